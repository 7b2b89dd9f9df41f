"""polyquant repair"""

from __future__ import annotations

import sys

import click

from polyquant.cli.console import as_json, json_option, progress, watcher
from polyquant.cli.terminal import say, say_some
from polyquant.errors import printable
from polyquant.formats.msmodelslim.repair import repair as run


@click.command(
    epilog="""\b
Examples:
  polyquant repair msmodelslim-folder/ mended/
  polyquant repair msmodelslim-folder/ mended/ --type W8A16
  polyquant repair msmodelslim-folder/ mended/ --dialect v1""",
)
@click.argument("src", type=click.Path())
@click.argument("dst", type=click.Path())
@click.option(
    "--type", "kind", metavar="WORD", help="Type (W8A16, W8A8, ...) of layers whose type nothing tells any more."
)
@click.option(
    "--dialect",
    type=click.Choice(["v1", "ascendv1", "v0"]),
    help="Names of files and keys.  [default: those that it has]",
)
@click.option("--overwrite", is_flag=True, help="Replace DST if it exists.")
@json_option
def repair(src: str, dst: str, kind: str | None, dialect: str | None, overwrite: bool, style: str) -> None:
    """Repair what can be recomputed in the msModelSlim folder SRC, into the new folder DST: description, deq_scale, quant_bias, file names.

    Exit code 1 if there is nothing to repair: then DST is not written.
    """
    with progress("repairing") as tell:
        done = run(src, dst, kind=kind, dialect=dialect, overwrite=overwrite, on_progress=watcher(tell))
    if style == "json":
        left = [{"code": f.code, "tensor": f.tensor, "file": f.file, "message": f.message} for f in done.left]
        as_json({"path": None if done.path is None else str(done.path), "changes": list(done.changes), "left": left})
    else:
        say_some(done.changes)
        say_some(map(str, done.left), "left as it is: ")
        if done.path is not None:
            say(f"wrote {printable(done.path)}")
    if done.path is None:
        say(
            f"polyquant: {printable(src)}: nothing to repair; {printable(dst)} was not written, use SRC as it is",
            err=True,
        )
        sys.exit(1)
