"""polyquant doctor"""

from __future__ import annotations

import sys

import click

from polyquant.analysis.doctor import doctor as run
from polyquant.cli.terminal import say, styled


@click.command(epilog="Example:  polyquant doctor")
def doctor() -> None:
    """Check this installation for problems and slow code paths. Exit 1 if something needs attention."""
    checks = run()
    for c in checks:
        mark = styled("ok", fg="green") if c.good else styled("!!", fg="yellow")
        say(mark, " ", styled(f"{c.name:11}", bold=True), f" {c.value}")
        if c.advice:
            say(f"               {c.advice}")
    if not all(c.good for c in checks):
        sys.exit(1)
