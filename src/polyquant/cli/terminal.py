"""The one door to stdout and stderr (scripts/check_house.py holds the other files of the command line to it).

Names, values and texts come from strangers' files, and a terminal obeys what it is sent: it changes its title, clears itself, writes over what it
has shown. So every line is escaped here, whether or not somebody thought of it before.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from io import StringIO
from types import TracebackType
from typing import Any

import click

from polyquant.errors import escaped, printable

__all__ = ["bug", "say", "say_json", "say_some", "stream", "styled", "usage", "width"]

_STEERING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""C0 without tab and newline, C1, separators of lines, bidi embeddings and isolates, lone surrogates. Joiners and odd spaces are text."""

_SOME = 20
_NO_LIMIT = 1 << 30


@dataclass(frozen=True, slots=True)
class _Styled:
    text: object
    style: dict[str, Any]


def styled(text: object, **style: Any) -> _Styled:
    """A piece for `say` in a style of click's (bold=True, fg="red"), where there are colours."""
    return _Styled(text, style)


def say(*pieces: object, err: bool = False) -> None:
    """One line on stdout or stderr, of pieces that are escaped whatever they hold, line ends too."""
    line = "".join(click.style(escaped(p.text), **p.style) if isinstance(p, _Styled) else escaped(p) for p in pieces)
    click.echo(line, err=err, color=False if os.environ.get("NO_COLOR") else None)


def say_some(lines: Iterable[str], before: str = "", *, err: bool = False) -> None:
    """Notes or warnings, each on its line behind `before`. A file can bring thousands: the first are said, the rest are counted."""
    found = list(lines)
    for line in found[:_SOME]:
        say(before, printable(line, 600), err=err)
    if len(found) > _SOME:
        say(before, f"and {len(found) - _SOME} more", err=err)


def stream(text: str) -> None:
    """What a model says, at once and without a line end: as it is, but on a terminal what would steer it is escaped."""
    if sys.stdout.isatty():
        text = _STEERING.sub(lambda found: ascii(found[0])[1:-1], text)
    sys.stdout.write(text)
    sys.stdout.flush()


def say_json(value: Any) -> None:
    """A JSON value on stdout, in printable ASCII."""
    text = json.dumps(value, indent=1, ensure_ascii=True)
    click.echo(text.replace("\x7f", "\\u007f"))  # the one control character that json leaves, and only inside strings


def usage(problem: click.ClickException) -> None:
    """click's own words about the arguments, which it quotes: `polyquant inspect *` puts names of files there."""
    shown = StringIO()
    problem.show(shown)
    for line in shown.getvalue().removesuffix("\n").split("\n"):
        say(printable(line, 600), err=True)


def width() -> int:
    """Columns of the terminal, or of the environment's COLUMNS; no limit in a pipe or file."""
    return shutil.get_terminal_size(fallback=(_NO_LIMIT, 0)).columns


def bug(kind: type[BaseException], problem: BaseException, trace: TracebackType | None) -> None:
    """sys.excepthook: a traceback as always, but for what its message quotes of a file."""
    for line in "".join(traceback.format_exception(kind, problem, trace)).removesuffix("\n").split("\n"):
        say(line, err=True)
