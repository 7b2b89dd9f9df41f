"""polyquant codecs"""

from __future__ import annotations

import click

from polyquant.analysis.catalogue import codecs as listed_codecs
from polyquant.cli.console import json_option, show_records
from polyquant.cli.terminal import width

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
    columns = ("=codec", ">bpw", "=form", "formats", "description")[: 5 if width() >= _WIDE else 4]
    rows = (
        (info.name, "-" if info.bpw is None else f"{info.bpw:.4g}", info.form, info.held_by, info.about)[: len(columns)]
        for info in every
    )
    writable = sum(bool(info.written_by) for info in every)
    show_records(every, style, columns, rows, [f"{len(every)} codecs, {writable} of them writable"])
