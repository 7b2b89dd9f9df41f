"""Formatting: sizes, tables that fit the terminal, progress bars (silent in a pipe), JSON."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import click

from polyquant.cli.grouped import SPEED, GroupedOption
from polyquant.cli.terminal import say, say_json, styled, width
from polyquant.errors import printable
from polyquant.tables import size

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from polyquant.formats.steps import Progress as ProgressEvent

_NARROWEST = 8
_RATE_EVERY = 0.1  # seconds
"""Minimum width of a column that wraps."""

__all__ = [
    "Table",
    "activations_option",
    "as_json",
    "cache_option",
    "decibel",
    "json_option",
    "lookup_option",
    "paragraph",
    "progress",
    "show_records",
    "size",
    "table",
    "tensor_name",
    "watcher",
]


def decibel(x: float) -> str:
    """A signal-to-noise ratio; "equal" for equal arrays."""
    return "equal" if math.isinf(x) and x > 0 else "-" if math.isinf(x) else f"{x:.1f}"


class Table:
    """A table as wide as the terminal: long text wraps inside its column, numbers do not. Pipes get a line per row."""

    def __init__(self, columns: tuple[str, ...]) -> None:
        self._right = [c.startswith(">") for c in columns]
        self._uncut = [c.startswith((">", "=")) for c in columns]
        self._head = [c.lstrip(">=") for c in columns]
        self._rows: list[list[str]] = []

    def add_row(self, *cells: str) -> None:
        """Add a row; control characters are escaped."""
        self._rows.append([cell if cell.isprintable() else printable(cell) for cell in cells])

    def lines(self, most: int) -> list[str]:
        """The header and rows in at most `most` columns: the widest text column wraps, at 8 characters or more."""
        rows = [self._head, *self._rows]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        texts = [i for i, uncut in enumerate(self._uncut) if not uncut]
        while texts and sum(widths) + 2 * (len(widths) - 1) > most:
            widest = max(texts, key=widths.__getitem__)
            if widths[widest] <= _NARROWEST:
                break
            widths[widest] -= 1
        return [line for row in rows for line in self._wrapped(row, widths)]

    def _wrapped(self, row: list[str], widths: list[int]) -> Iterator[str]:
        """The lines of one row."""
        cells = [_pieces(cell, n) for cell, n in zip(row, widths, strict=True)]
        for pieces in zip_longest(*cells, fillvalue=""):
            yield "  ".join(
                piece.rjust(n) if right else piece.ljust(n)
                for piece, n, right in zip(pieces, widths, self._right, strict=True)
            ).rstrip()

    def show(self) -> None:
        """Print it."""
        head, *rows = self.lines(width())
        say(styled(head, bold=True))
        for row in rows:
            say(row)


def _pieces(text: str, most: int) -> list[str]:
    """Split text into lines of at most `most` columns, after a space or separator in their second half if possible."""
    out = []
    while len(text) > most:
        at = max(text.rfind(c, most // 2, most) for c in " ._-/>") + 1 or most
        out.append(text[:at].rstrip())
        text = text[at:].lstrip()
    return [*out, text]


def _cut(text: str, most: int) -> str:
    """Cut an overlong text in the middle."""
    return text if len(text) <= most else f"{text[: (most - 1) // 2]}…{text[-(most // 2) :]}"


def tensor_name(name: str, most: int = 34) -> str:
    """A name from a file, escaped and cut in the middle."""
    return _cut(printable(name), most)


def table(*columns: str) -> Table:
    """An empty table; a column that starts with '>' is right-aligned, and one that starts with '=' does not wrap."""
    return Table(columns)


def show_records(
    records: Iterable[DataclassInstance],
    style: str,
    columns: Iterable[str],
    rows: Iterable[Iterable[str]],
    last: Iterable[str],
) -> None:
    """Print rows as a table and the last lines; with --format json all fields of the records instead."""
    if style == "json":
        as_json([asdict(record) for record in records])
        return
    shown = table(*columns)
    for row in rows:
        shown.add_row(*row)
    shown.show()
    for line in last:
        say(line)


def paragraph(*pieces: str) -> None:
    """Print pieces joined by '; ', with line breaks only between pieces."""
    lines = [""]
    for piece in pieces:
        if lines[-1] and len(lines[-1]) + 2 + len(piece) > width():
            lines[-1] += ";"
            lines.append("  ")
        lines[-1] += f"; {piece}" if lines[-1].strip() else piece
    for line in lines:
        say(line)


def as_json(value: Any) -> None:
    """Print strict JSON on stdout, in printable ASCII; infinities and NaN become null."""

    def clean(x: Any) -> Any:
        if isinstance(x, dict):
            return {str(k): clean(v) for k, v in x.items()}
        if isinstance(x, list | tuple):
            return [clean(v) for v in x]
        return None if isinstance(x, float) and not math.isfinite(x) else x

    say_json(clean(value))


@contextmanager
def progress(what: str, unit: str = "M/s", per: float = 1e6) -> Iterator[Callable[[int, int, str], None]]:
    """Show a progress bar with rate (in `unit`s of `per` per second) and remaining time; silent in a pipe.

    The block gets tell(done, total, name).
    """
    from rich.console import Console  # `--help` draws no bars
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    screen = Console(stderr=True, highlight=False)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TaskProgressColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[name]}", markup=False),  # "[/b]" is a name too
    )
    # A tensor can take longer than the 30 seconds over which rich averages the speed.
    silent = not screen.is_terminal
    with Progress(*columns, console=screen, transient=True, disable=silent, speed_estimate_period=3600) as bar:
        task = bar.add_task(what, total=None, rate="", name="")
        rate, rated = "", 0.0

        def tell(done: int, total: int, name: str) -> None:
            nonlocal rate, rated
            if silent:
                return
            now = time.monotonic()
            if now - rated >= _RATE_EVERY:  # rich sums up to a thousand samples
                speed, rated = bar.tasks[0].speed, now
                rate = f"{speed / per:,.{1 if speed < 10 * per else 0}f} {unit}" if speed else ""
            bar.update(task, completed=done, total=total, name=tensor_name(name, 24), rate=rate)

        yield tell


def watcher(tell: Callable[[int, int, str], None]) -> Callable[[ProgressEvent], None]:
    """A progress callback for library functions."""
    return lambda event: tell(event.done, event.total, event.tensor)


activations_option = click.option(
    "--activations",
    cls=GroupedOption,
    group=SPEED,
    type=click.Choice(["int8", "float"]),
    default="int8",
    show_default=True,
    help="int8 quantizes the inputs of quantized weights, or rounds those of FP8 to bfloat16, which is faster.",
)
cache_option = click.option(
    "--cache",
    cls=GroupedOption,
    group=SPEED,
    type=click.Choice(["f32", "f16", "int8"]),
    help="Type of the KV cache.  [default: f16; f32 with --activations float]",
)
lookup_option = click.option(
    "--prompt-lookup",
    cls=GroupedOption,
    group=SPEED,
    type=click.IntRange(0, 31),
    default=0,
    metavar="N",
    help="Draft up to N tokens from the text so far: faster where an answer repeats its prompt. Up to 3, answers "
    "stay the same; more, near ties of two tokens may be decided differently.  [default: 0, off]",
)
json_option = click.option(
    "--format",
    "style",
    type=click.Choice(["human", "json"]),
    default="human",
    show_default=True,
    help="Human-readable or JSON output.",
)
