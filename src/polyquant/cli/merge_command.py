"""polyquant merge"""

from __future__ import annotations

from typing import Any

import click

from polyquant.cli.console import as_json, json_option, progress, watcher
from polyquant.cli.grouped import GroupedCommand


@click.command(
    cls=GroupedCommand,
    epilog="""\b
Examples:
  for i in 1 2 3 4; do
    polyquant quantize hf-folder/ model.gguf --part $i/4 & done; wait
  polyquant merge model.gguf
  polyquant merge model.gguf --from /mnt/worker1 --from /mnt/worker2
  polyquant merge model.gguf --discard           # remove the parts""",
)
@click.argument("dst", type=click.Path())
@click.option(
    "--from",
    "sources",
    multiple=True,
    type=click.Path(),
    metavar="FOLDER",
    help="Copy the parts in this folder first: they ran on a machine that does not share DST's folder. Repeatable.",
)
@click.option("--overwrite", is_flag=True, help="Replace an existing DST.")
@click.option("--verify", is_flag=True, help="Read all bytes again and check them against the receipts.")
@click.option(
    "--allow-copies",
    is_flag=True,
    help="The parts read copies of the source: accept different modification times of files of the same size.",
)
@click.option("--discard", is_flag=True, help="Remove the parts instead of merging them.")
@json_option
def merge(
    dst: str, sources: tuple[str, ...], overwrite: bool, verify: bool, allow_copies: bool, discard: bool, style: str
) -> None:
    """Check the parts that `convert --part I/N` or `quantize --part I/N` wrote for DST, and publish the whole.

    A missing part is named with the command that makes it.
    """
    from polyquant.cli.conversion import print_report
    from polyquant.cli.terminal import say
    from polyquant.conversion.merge import discard_parts
    from polyquant.conversion.merge import merge as merged
    from polyquant.errors import printable

    if discard:
        given: dict[str, Any] = {"--from": sources, "--overwrite": overwrite, "--verify": verify}
        if wrong := [name for name, value in given.items() if value]:
            raise click.UsageError(f"--discard and {wrong[0]} are mutually exclusive")
        discard_parts(dst)
        say(f"removed the parts of {printable(dst)}")
        return
    with progress("copying", "B/s", 1) as tell:
        report = merged(
            dst, sources, overwrite=overwrite, verify=verify, allow_copies=allow_copies, on_progress=watcher(tell)
        )
    if style == "json":
        as_json(report.to_json())
    else:
        print_report(report)
