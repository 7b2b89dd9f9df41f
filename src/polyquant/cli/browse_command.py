"""polyquant browse"""

from __future__ import annotations

import os
import signal
import sys
from importlib.util import find_spec

import click

from polyquant.cli.option_flags import source_option
from polyquant.cli.source_type import SOURCE
from polyquant.cli.terminal import leave
from polyquant.errors import UnsupportedError
from polyquant.integrations.tui.headers import Headers, read_ahead
from polyquant.no_collection import no_collection

_WAIT = 1.0
"""Seconds for threads to notice that they are cancelled."""


@click.command(
    epilog="""\b
Examples:
  polyquant browse model.gguf
  polyquant browse hf-folder/ model-q4_k_m.gguf    # side by side
  polyquant browse hf://org/model                  # fetches headers only""",
)
@click.argument("paths", metavar="PATH...", nargs=-1, required=True, type=SOURCE)
@click.option(
    "--theme", type=click.Choice(["auto", "dark", "light"]), default="auto", show_default=True,
    help="Colors; auto uses the environment's COLORFGBG. NO_COLOR removes them.",
)  # fmt: skip
@source_option("ternary_layout")
def browse(paths: tuple[str, ...], theme: str, ternary_layout: str | None) -> None:
    """Browse models in the terminal: tensors with statistics and histograms, metadata, tokenizer, chat template,
    findings. Two or more PATHs are compared with the first.

    Only headers are read until you request more. `?` shows all keys. Needs the extra `tui`.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UnsupportedError("browse needs a terminal", hint="use `polyquant inspect`, whose output can be piped")
    if find_spec("textual") is None:
        raise UnsupportedError("browse requires the package 'textual'", hint="pip install 'polyquant[tui]'")

    def read() -> Headers:
        from polyquant.integrations.tui.models import Models

        return Models(paths[:2], ternary_layout).headers()

    ahead = read_ahead(paths[:2], read)
    with no_collection():
        from polyquant.integrations.tui.app import Browser

    light = theme == "light" or (theme == "auto" and _light_terminal())
    browser = Browser(paths, ternary_layout=ternary_layout, light=light, read_ahead=ahead)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: browser.interrupt())
    problem = browser.run()
    ended = browser.jobs.join(_WAIT)
    if problem is not None:
        raise problem
    if not ended:
        leave()  # a thread that still waits for a server


def _light_terminal() -> bool:
    """COLORFGBG is "foreground;background"; 7 and 15 are white."""
    return os.environ.get("COLORFGBG", "").rpartition(";")[2] in ("7", "15")
