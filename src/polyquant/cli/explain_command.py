"""polyquant explain"""

from __future__ import annotations

import textwrap

import click

from polyquant.analysis.explain import explain as run
from polyquant.cli.terminal import say


@click.command(epilog="Example:  polyquant explain GGUF012")
@click.argument("code")
def explain(code: str) -> None:
    """Explain the finding CODE: its meaning, its consequences, and what to do."""
    for line in (code.upper(), *textwrap.wrap(run(code), 79)):
        say(line)
