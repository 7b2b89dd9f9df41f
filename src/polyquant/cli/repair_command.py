"""polyquant repair"""

from __future__ import annotations

import sys

import click

from polyquant.cli.console import as_json, json_option, progress, watcher
from polyquant.cli.source_type import SOURCE
from polyquant.cli.terminal import say, say_some
from polyquant.errors import printable
from polyquant.formats.msmodelslim.repair import repair as run


@click.command(
    epilog="""\b
Examples:
  polyquant repair msmodelslim-folder/ repaired/
  polyquant repair msmodelslim-folder/ repaired/ --type W8A16
  polyquant repair msmodelslim-folder/ repaired/ --dialect v1""",
)
@click.argument("src", type=SOURCE)
@click.argument("dst", type=click.Path())
@click.option(
    "--type", "kind", metavar="WORD", help="Type (W8A16, W8A8, ...) of layers whose type cannot be determined."
)
@click.option(
    "--dialect",
    type=click.Choice(["v1", "ascendv1", "v0"]),
    help="Dialect of file names and keys.  [default: as in SRC]",
)
@click.option("--overwrite", is_flag=True, help="Replace DST if it exists.")
@json_option
def repair(src: str, dst: str, kind: str | None, dialect: str | None, overwrite: bool, style: str) -> None:
    """Repair the msModelSlim folder SRC into DST: recompute description, deq_scale, quant_bias and file names.

    If there is nothing to repair, DST is not written and the exit code is 1.
    """
    with progress("repairing") as tell:
        done = run(src, dst, kind=kind, dialect=dialect, overwrite=overwrite, on_progress=watcher(tell))
    if style == "json":
        left = [{"code": f.code, "tensor": f.tensor, "file": f.file, "message": f.message} for f in done.left]
        as_json({"path": None if done.path is None else str(done.path), "changes": list(done.changes), "left": left})
    else:
        say_some(done.changes)
        say_some(map(str, done.left), "not repaired: ")
        if done.path is not None:
            say(f"wrote {printable(done.path)}")
    if done.path is None:
        source, target = printable(src), printable(dst)
        say(f"polyquant: {source}: nothing to repair; {target} was not written, use {source}", err=True)
        sys.exit(1)
