"""All output to stdout and stderr (scripts/check_house.py enforces it for the other files of the command line).

Names, values and text come from untrusted files, and terminals interpret control characters: they could change the
title, clear the screen or overwrite earlier output. So every line is escaped here.
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
from io import StringIO, TextIOWrapper
from types import TracebackType
from typing import Any, NoReturn

import click

from polyquant.errors import escaped, printable

__all__ = ["bug", "leave", "open_standard_streams", "say", "say_json", "say_some", "stream", "styled", "usage", "width"]

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""C0 except tab and newline, C1, line separators, bidi embeddings and isolates, lone surrogates. Joiners and unusual
spaces are kept.
"""

_SOME = 20
_NO_LIMIT = 1 << 30


def open_standard_streams() -> None:
    """Connect closed standard streams (`polyquant ... >&-`) to /dev/null, as git does: otherwise the next opened file,
    perhaps the output, becomes stdout. Characters that an encoding lacks are written as escapes.
    """
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free descriptor, which is fd
        if getattr(sys, name) is None:
            mode, errors = ("r", "strict") if fd == 0 else ("w", "backslashreplace")
            setattr(sys, name, open(fd, mode, encoding="utf-8", errors=errors, closefd=False))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # pytest and notebooks replace them
            stream.reconfigure(errors="backslashreplace")


@dataclass(frozen=True, slots=True)
class _Styled:
    text: object
    style: dict[str, Any]


def styled(text: object, **style: Any) -> _Styled:
    """A piece for `say` in a click style (bold=True, fg="red"), if the terminal has colours."""
    return _Styled(text, style)


def say(*pieces: object, err: bool = False) -> None:
    """Print one line on stdout or stderr. Pieces are escaped, including line ends."""
    line = "".join(click.style(escaped(p.text), **p.style) if isinstance(p, _Styled) else escaped(p) for p in pieces)
    click.echo(line, err=err, color=False if os.environ.get("NO_COLOR") else None)


def say_some(lines: Iterable[str], before: str = "", *, err: bool = False) -> None:
    """Print notes or warnings after `before`, one per line. At most _SOME are printed, the rest is counted."""
    shown = list(lines)
    for line in shown[:_SOME]:
        say(before, printable(line, 600), err=err)
    if len(shown) > _SOME:
        say(before, f"and {len(shown) - _SOME} more", err=err)


def stream(text: str) -> None:
    """Write generated text at once, without a line end; control characters are escaped on a terminal."""
    if sys.stdout.isatty():
        text = _CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)
    sys.stdout.write(text)
    sys.stdout.flush()


def say_json(value: Any) -> None:
    """Print a JSON value on stdout, in printable ASCII."""
    text = json.dumps(value, indent=1, ensure_ascii=True)
    click.echo(text.replace("\x7f", "\\u007f"))  # the one control character that json does not escape


def leave() -> NoReturn:
    """End the process with status 0 without waiting for its threads."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def usage(problem: click.ClickException) -> None:
    """Print click's usage error. It quotes arguments, which may be file names (`polyquant inspect *`)."""
    shown = StringIO()
    problem.show(shown)
    for line in shown.getvalue().removesuffix("\n").split("\n"):
        say(printable(line, 600), err=True)


def width() -> int:
    """Width of the terminal in columns, or the environment's COLUMNS; no limit in a pipe or file."""
    return shutil.get_terminal_size(fallback=(_NO_LIMIT, 0)).columns


def bug(kind: type[BaseException], problem: BaseException, trace: TracebackType | None) -> None:
    """sys.excepthook: the traceback, with text quoted from files escaped."""
    for line in "".join(traceback.format_exception(kind, problem, trace)).removesuffix("\n").split("\n"):
        say(line, err=True)
