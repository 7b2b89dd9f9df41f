"""polyquant architectures"""

from __future__ import annotations

import click

from polyquant.analysis.architectures import known_architectures
from polyquant.cli.console import json_option, show_records


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
    rows = ((k.class_name, k.name, "yes" if k.runs else "-", ", ".join(k.traits)) for k in known)
    total = f"{len(known)} architectures convert both ways, {sum(k.runs for k in known)} of them run"
    show_records(known, style, ("=Hugging Face class", "GGUF", "runs", "traits"), rows, [total])
