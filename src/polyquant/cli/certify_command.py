"""polyquant certify"""

from __future__ import annotations

import sys

import click

from polyquant.analysis.certify import Certificate, refuse_output
from polyquant.analysis.certify import certify as run
from polyquant.cli.console import as_json, json_option, paragraph, progress, watcher
from polyquant.cli.option_flags import source_option
from polyquant.cli.source_type import SOURCE
from polyquant.cli.terminal import say, styled
from polyquant.errors import printable
from polyquant.types import Severity

_COLOUR = {Severity.ERROR: "red", Severity.WARNING: "yellow", Severity.NOTE: "cyan"}
_SHOWN = 5


@click.command(
    epilog="""\b
Examples:
  polyquant certify hf-folder/ model.gguf
  polyquant certify hf-folder/ model.gguf -o certificate.json; echo $?
  polyquant certify model.gguf hf-folder/ --no-logits --format json""",
)
@click.argument("source", type=SOURCE)
@click.argument("target", type=SOURCE)
@click.option("-o", "--output", type=click.Path(), metavar="FILE", help="Write the certificate as JSON.")
@click.option("--logits/--no-logits", default=True, show_default=True, help="Also run both models on a short text.")
@source_option("ternary_layout")
@source_option("ternary_layout", flag="--source-layout", help="The same for SOURCE.")
@source_option("tile")
@click.option("--repair", is_flag=True, help="TARGET is a Metal Marlin Trellis folder: undo its quantizer's bugs.")
@click.option(
    "--axes",
    type=click.Choice(["kn", "nk"]),
    help="Tile order of a Trellis folder TARGET, if its files do not show it.",
)
@json_option
def certify(
    source: str,
    target: str,
    output: str | None,
    logits: bool,
    ternary_layout: str | None,
    source_layout: str | None,
    tile: tuple[int, int, int] | None,
    repair: bool,
    axes: str | None,
    style: str,
) -> None:
    """Check that TARGET computes what SOURCE does, however it was converted.

    Compares every block of every tensor within the error of its codec, hyper-parameters, tokenizer and logits, and
    names the differences. Exit 0: certified, 1: not certified, 2: cannot be read.
    """
    if output is not None:
        refuse_output(output)
    with progress("certifying") as tell:
        result = run(
            source,
            target,
            logits=logits,
            digests=output is not None or style == "json",
            ternary_layout=ternary_layout,
            source_layout=source_layout,
            tile=tile,
            repair=repair,
            axes=axes,
            on_progress=watcher(tell),
        )
    if output is not None:
        result.write(output)
    if style == "json":
        as_json(result.to_json())
    else:
        _print(result, output)
    if not result.certified:
        sys.exit(1)


def _print(result: Certificate, output: str | None) -> None:
    seen: dict[str, int] = {}
    for f in result.findings:
        seen[f.code] = seen.get(f.code, 0) + 1
        if seen[f.code] <= _SHOWN:
            where = f" {printable(f.tensor)}:" if f.tensor else ""
            say(styled(f"{f.code} {f.severity.value}", fg=_COLOUR[f.severity]), f"{where} {printable(f.message, 400)}")
    for code, n in seen.items():
        if n > _SHOWN:
            say(f"{code}: {n - _SHOWN} more")
    paragraph(*result.summary.split("; "))
    if result.certified:
        say(styled("certified", fg="green"), f": {printable(result.target.path)} computes what "
            f"{printable(result.source.path)} does")  # fmt: skip
    else:
        n = len(result.failures)
        say(styled("not certified", fg="red"), f": {n} finding{'s' * (n > 1)}; "
            f"polyquant explain {result.failures[0].code}")  # fmt: skip
    if output is not None:
        say(f"wrote {printable(output)}")
