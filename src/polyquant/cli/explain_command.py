"""polyquant explain"""

from __future__ import annotations

import textwrap

import click

from polyquant.analysis.validate import explain as run


@click.command(epilog="Example:  polyquant explain GGUF012")
@click.argument("code")
def explain(code: str) -> None:
    """What the finding CODE means, what breaks, and what to do."""
    click.echo(f"{code.upper()}\n" + textwrap.fill(run(code), 79))
