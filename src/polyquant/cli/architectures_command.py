"""polyquant architectures"""

from __future__ import annotations

from dataclasses import asdict

import click

from polyquant.analysis.architectures import known_architectures
from polyquant.cli.console import as_json, json_option, table
from polyquant.cli.terminal import say


@click.command(
    epilog="""\b
Examples:
  polyquant architectures
  polyquant architectures --format json""",
)
@json_option
def architectures(style: str) -> None:
    """Model architectures: all convert between Hugging Face and GGUF; which of them run here."""
    found = known_architectures()
    if style == "json":
        as_json([asdict(known) for known in found])
        return
    rows = table("=Hugging Face class", "GGUF", "runs", "traits")
    for known in found:
        rows.add_row(known.class_name, known.name, "yes" if known.runs else "-", ", ".join(known.traits))
    rows.show()
    say(f"{len(found)} architectures convert both ways, {sum(known.runs for known in found)} of them run")
