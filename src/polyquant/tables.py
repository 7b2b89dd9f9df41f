"""Representations in interactive sessions: one short line as text, a table in a notebook; and rows for data frames.

Names may come from untrusted files and be numerous: in a displayed table every cell is escaped and cut, and only the
first rows are shown. `rows()` of a result has all rows, with the exact values.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from itertools import islice
from typing import Any, Protocol, TypeVar

from polyquant.errors import printable

__all__ = ["ROWS", "Listing", "Row", "Table", "Tabular", "decibel", "size", "tensor_columns"]

ROWS = 40
"""Maximum rows of a table."""
_CELL = 120
"""Maximum characters of a cell."""
_LEFT = ' style="text-align:left"'
_NUMBER = re.compile(r"(?:-?[\d.,]+(?:e[-+]\d+)?(?: ?(?:%|dB|B|[KMGT]iB|± \S+))?|exact|-|)")
"""A cell that is aligned to the right."""

T = TypeVar("T")

Cell = str | int | float | bool | tuple[int, ...] | tuple[str, ...] | None
Row = dict[str, Cell]
"""One row of `rows()`: column -> value. All rows of a result have the same columns."""


class Tabular(Protocol):
    """A result as rows of plain Python values: `pandas.DataFrame(result.rows())`. docs/python.md lists the columns."""

    def rows(self) -> list[Row]:
        """All rows, one dict each."""


def tensor_columns(name: str, shape: tuple[int, ...], nbytes: int) -> Row:
    """The columns of every row about a tensor: tensor, shape, weights, bytes, bpw."""
    weights = math.prod(shape)
    return {"tensor": name, "shape": shape, "weights": weights, "bytes": nbytes, "bpw": 8 * nbytes / max(1, weights)}


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
        """The table as HTML, for Jupyter, which aligns to the right: columns of text get a style."""

        rows = self._cells()
        texts = [not all(_NUMBER.fullmatch(row[i]) for row in rows) for i in range(len(self.columns))]
        below = "".join(f"<div>{html.escape(line)}</div>" for line in self._rest())
        table = ""
        if rows:
            head, *body = (
                "<tr>" + "".join(f"<{tag}{_LEFT * left}>{html.escape(cell)}</{tag}>" for cell, left in cells) + "</tr>"
                for tag, cells in (
                    ("th", zip(self.columns, texts, strict=True)),
                    *(("td", zip(row, texts, strict=True)) for row in rows),
                )
            )
            table = f"<table><thead>{head}</thead><tbody>{''.join(body)}</tbody></table>"
        return f"<div><strong>{html.escape(_cell(self.title))}</strong>{table}{below}</div>"

    def _cells(self) -> list[list[str]]:
        return [[_cell(value) for value in row] for row in islice(self.rows, self.most)]

    def _rest(self) -> list[str]:
        """The number of omitted rows, and the lines below."""
        more = [f"... and {self.total - self.most:,} more"] if self.total > self.most else []
        return [*more, *map(_cell, islice(self.below, ROWS))]


def _cell(value: object) -> str:
    return printable(value, _CELL)


def _plain(value: Any) -> Any:
    """The value of an enumeration; anything else is plain already."""
    return value.value if isinstance(value, Enum) else value


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

    def rows(self) -> list[Row]:
        """The fields of each entry, as plain values."""
        entries: list[Any] = list(self)
        return [{f.name: _plain(getattr(entry, f.name)) for f in fields(entry)} for entry in entries]

    def __repr__(self) -> str:
        return self.table().text()

    def _repr_html_(self) -> str:
        return self.table().html()
