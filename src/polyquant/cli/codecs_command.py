"""polyquant codecs"""

from __future__ import annotations

from dataclasses import asdict

import click

from polyquant.analysis.catalogue import codecs as listed_codecs
from polyquant.cli.console import as_json, json_option, table
from polyquant.cli.terminal import say, width

_WIDE = 120
"""Terminal width from which descriptions are shown."""


@click.command(
    epilog="""\b
Examples:
  polyquant codecs
  polyquant codecs --format json""",
)
@json_option
def codecs(style: str) -> None:
    """List codecs (quantization types): bits per weight, and the formats that read and write each.

    Bits per weight are those of a matrix [4096, 4096], scales included. Any writable codec can be passed to --codec and
    --rule of `polyquant convert`.
    """
    every = listed_codecs()
    if style == "json":
        as_json([asdict(info) for info in every])
        return
    described = width() >= _WIDE
    rows = table("=codec", ">bpw", "=form", "formats", *(["description"] if described else []))
    for info in every:
        bpw = "-" if info.bpw is None else f"{info.bpw:.4g}"
        rows.add_row(info.name, bpw, info.form, info.held_by, *([info.about] if described else []))
    rows.show()
    say(f"{len(every)} codecs, {sum(bool(info.written_by) for info in every)} of them writable")
