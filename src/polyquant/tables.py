"""Representations in interactive sessions: one short line as text, a table in a notebook.

Names may come from untrusted files and be numerous: every cell is escaped and cut, and a table shows only its first
rows.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

from polyquant.errors import printable

__all__ = ["ROWS", "Listing", "Table", "decibel", "size"]

ROWS = 40
"""Maximum rows of a table."""
_CELL = 120
"""Maximum characters of a cell."""

T = TypeVar("T")


def size(n: float) -> str:
    """Bytes in powers of 1024, e.g. "1.5 MiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.2f} TiB"


def decibel(snr: float) -> str:
    """A signal-to-noise ratio in dB, e.g. "43.1 dB"; "exact" if nothing was lost."""
    return "exact" if snr == math.inf else "-" if math.isinf(snr) else f"{snr:.1f} dB"


@dataclass(frozen=True, slots=True)
class Table:
    """A table: title, column names, rows out of `total`, lines below. most: maximum rows shown."""

    title: str
    columns: Sequence[str]
    rows: Iterable[Sequence[object]]
    total: int
    below: Sequence[str] = field(default=())
    most: int = ROWS

    def text(self) -> str:
        """Aligned columns below the title."""
        cells = [list(self.columns), *self._cells()]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(cell.ljust(n) for cell, n in zip(row, widths, strict=True)).rstrip() for row in cells]
        return "\n".join([_cell(self.title), *(lines if self.total else ()), *self._rest()])

    def html(self) -> str:
        """The table as HTML, for Jupyter."""
        head = "".join(f"<th>{html.escape(name)}</th>" for name in self.columns)
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in self._cells()
        )
        below = "".join(f"<div>{html.escape(line)}</div>" for line in self._rest())
        return (
            f"<div><strong>{html.escape(_cell(self.title))}</strong>"
            f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{below}</div>"
        )

    def _cells(self) -> list[list[str]]:
        return [[_cell(value) for value in row] for row in islice(self.rows, self.most)]

    def _rest(self) -> list[str]:
        """The number of omitted rows, and the lines below."""
        more = [f"... and {self.total - self.most:,} more"] if self.total > self.most else []
        return [*more, *map(_cell, islice(self.below, ROWS))]


def _cell(value: object) -> str:
    return printable(value, _CELL)


class Listing(list[T]):
    """A list displayed as a table: `repr()` as text, `_repr_html_()` in a notebook. A subclass defines the columns."""

    title = "items"
    columns: tuple[str, ...] = ("entry",)
    most = ROWS

    def row(self, entry: T) -> Sequence[object]:
        """The cells of one entry."""
        return (entry,)

    def table(self) -> Table:
        """The table that is displayed."""
        title = f"{len(self):,} {self.title if len(self) != 1 else self.title.removesuffix('s')}"
        return Table(title, self.columns, (self.row(entry) for entry in self), len(self), most=self.most)

    def __repr__(self) -> str:
        return self.table().text()

    def _repr_html_(self) -> str:
        return self.table().html()
