"""Contents of lists: lines known in advance, a wrapped text, the entries of a long array."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from rich.cells import cell_len, chop_cells

from polyquant.errors import escaped

__all__ = ["Fixed", "Items", "Source", "Text"]

_TAB = "    "
_MEASURED = 500
"""Lines that decide the width of a column."""


class Source(Protocol):
    """The content of a list."""

    def heads(self, width: int) -> Sequence[tuple[str, int, bool]]:
        """(title, width, right-aligned) of each column on a screen of this width."""

    def count(self) -> int:
        """Number of lines."""

    def cells(self, index: int) -> Sequence[str]:
        """The escaped cells of a line, in the columns of the last `heads`."""

    def style(self, index: int) -> str:
        """Component class of a line: "", "rows--group" or "rows--warn"."""


class Fixed:
    """Lines that are known in advance, escaped.

    titles: one that starts with ">" is right-aligned. wide: the column that gets the rest of the line; others are at
    most `most` cells wide. warn: indices of highlighted lines.
    """

    def __init__(
        self,
        titles: Sequence[str],
        lines: Sequence[Sequence[str]],
        *,
        wide: int = 0,
        most: int = 44,
        warn: frozenset[int] = frozenset(),
    ) -> None:
        self.titles, self.lines, self._warn = titles, lines, warn
        self._wide = wide
        self._widths = [
            min(most, max([cell_len(t.lstrip(">")), *(cell_len(line[i]) for line in lines[:_MEASURED])]))
            for i, t in enumerate(titles)
        ]

    def heads(self, width: int) -> list[tuple[str, int, bool]]:
        """The wide column gets at least a third of the line."""
        widths = list(self._widths)
        gaps = 2 * (len(widths) - 1)
        others = [i for i in range(len(widths)) if i != self._wide]
        while others and sum(widths[i] for i in others) > (width - gaps) * 2 // 3:
            widest = max(others, key=widths.__getitem__)
            if widths[widest] <= 8:
                break
            widths[widest] -= 1
        widths[self._wide] = max(1, width - gaps - sum(widths[i] for i in others))
        return [(t.lstrip(">"), n, t.startswith(">")) for t, n in zip(self.titles, widths, strict=True)]

    def count(self) -> int:
        """Number of lines."""
        return len(self.lines)

    def cells(self, index: int) -> Sequence[str]:
        """The cells of a line."""
        return self.lines[index]

    def style(self, index: int) -> str:
        """Highlight some lines."""
        return "rows--warn" if index in self._warn else ""


class Text:
    """Text from a file, wrapped to the width of the screen; control characters except line ends are escaped."""

    def __init__(self, title: str, text: str) -> None:
        self.title, self.text = title, text
        self._width, self._lines = 0, [""]

    def heads(self, width: int) -> list[tuple[str, int, bool]]:
        """Wrap again if the width changed."""
        if width != self._width:
            self._width = width
            shown = (escaped(line.replace("\t", _TAB).removesuffix("\r")) for line in self.text.split("\n"))
            self._lines = [piece for line in shown for piece in (chop_cells(line, max(1, width)) or [""])]
        return [(self.title, width, False)]

    def count(self) -> int:
        """Number of wrapped lines."""
        return len(self._lines)

    def cells(self, index: int) -> Sequence[str]:
        """One line."""
        return (self._lines[index],)

    def style(self, index: int) -> str:
        """No highlights."""
        return ""


class Items:
    """The entries of a long array, each converted when it is drawn."""

    def __init__(self, title: str, count: int, item: Callable[[int], str]) -> None:
        self.title, self._count, self._item = title, count, item

    def heads(self, width: int) -> list[tuple[str, int, bool]]:
        """The index and the value."""
        index = max(5, len(f"{self._count:,}"))
        return [("index", index, True), (self.title, max(1, width - index - 2), False)]

    def count(self) -> int:
        """Number of entries."""
        return self._count

    def cells(self, index: int) -> Sequence[str]:
        """One entry."""
        return (f"{index:,}", self._item(index))

    def style(self, index: int) -> str:
        """No highlights."""
        return ""
