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
    """List model architectures. All convert between Hugging Face and GGUF; the table shows which of them run here."""
    known = known_architectures()
    if style == "json":
        as_json([asdict(k) for k in known])
        return
    rows = table("=Hugging Face class", "GGUF", "runs", "traits")
    for k in known:
        rows.add_row(k.class_name, k.name, "yes" if k.runs else "-", ", ".join(k.traits))
    rows.show()
    say(f"{len(known)} architectures convert both ways, {sum(k.runs for k in known)} of them run")
