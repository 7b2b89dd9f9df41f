"""polyquant doctor"""

from __future__ import annotations

import sys

import click

from polyquant.analysis.doctor import doctor as run
from polyquant.cli.console import out


@click.command(epilog="Example:  polyquant doctor")
def doctor() -> None:
    """Is this installation sound and fast? Exit 1 if something needs attention."""
    checks = run()
    for c in checks:
        mark = "[green]ok[/green]" if c.good else "[yellow]!![/yellow]"
        out.print(f"{mark} [bold]{c.name:11}[/bold] {c.value}")
        if c.advice:
            out.print(f"               {c.advice}")
    if not all(c.good for c in checks):
        sys.exit(1)
