"""A list of any length with columns and a cursor: only the visible lines are drawn.

Textual's DataTable and Tree hold an object for every cell or node: 70,000 tensors would take seconds and a gigabyte.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.cells import cell_len, set_cell_size
from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from polyquant.integrations.tui.sources import Source

__all__ = ["Rows"]


class Rows(ScrollView):
    """A list with a fixed head. Posts Moved and Chosen with the index of a line, HeadClicked with that of a column."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {"rows--head", "rows--cursor", "rows--group", "rows--warn"}
    DEFAULT_CSS = """
    Rows {
        height: 1fr;
        overflow-x: hidden;
        scrollbar-size-vertical: 1;
        .rows--head { text-style: bold; background: $panel; color: $text; }
        .rows--cursor { text-style: reverse; }
        .rows--group { text-style: bold; }
        .rows--warn { color: $text-warning; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "up", show=False),
        Binding("down,j", "move(1)", "down", show=False),
        Binding("pageup", "page(-1)", "page up", show=False),
        Binding("pagedown", "page(1)", "page down", show=False),
        Binding("home,g", "end(0)", "first", show=False),
        Binding("end,G", "end(1)", "last", show=False),
        Binding("enter", "choose", "choose", show=False),
    ]

    class Moved(Message):
        """The cursor is on another line."""

        def __init__(self, rows: Rows, index: int) -> None:
            super().__init__()
            self.rows, self.index = rows, index

    class Chosen(Moved):
        """Enter, or a click on the line of the cursor."""

    class HeadClicked(Moved):
        """A click on the head of a column."""

    def __init__(self, source: Source, *, cursor: int = 0) -> None:
        super().__init__()
        self.can_focus = True
        self.source, self.cursor = source, cursor
        self._heads: Sequence[tuple[str, int, bool]] = ()

    def reload(self, cursor: int | None = None) -> None:
        """The source changed."""
        self.cursor = max(0, min(self.cursor if cursor is None else cursor, self.source.count() - 1))
        self.virtual_size = Size(self._width, self.source.count() + 1)
        self._follow()
        self.refresh()
        self.post_message(self.Moved(self, self.cursor))

    def on_resize(self, event: events.Resize) -> None:
        """Compute the widths again."""
        self.virtual_size = Size(self._width, self.source.count() + 1)
        self._follow()
        self.refresh()

    def render_line(self, y: int) -> Strip:
        """Draw one line of the screen; the first is the head."""
        width = self._width
        if y == 0 or sum(n for _, n, _ in self._heads) > width:
            self._heads = self.source.heads(width)
        if y == 0:
            titles = [title for title, _, _ in self._heads]
            return self._strip(titles, self.get_component_rich_style("rows--head"))
        index = y - 1 + self.scroll_offset.y
        if index >= self.source.count():
            return Strip.blank(width, self.rich_style)
        kind = self.source.style(index)
        style = self.get_component_rich_style(kind) if kind else self.rich_style
        if index == self.cursor:
            style += self.get_component_rich_style("rows--cursor", partial=True)
        return self._strip(self.source.cells(index), style)

    @property
    def _width(self) -> int:
        """The width without the scroll bar."""
        width: int = self.scrollable_content_region.width
        return width

    def _strip(self, cells: Sequence[str], style: Style) -> Strip:
        pieces = []
        for text, (_, width, right) in zip(cells, self._heads, strict=True):
            long = cell_len(text) > width
            shown = (
                set_cell_size(text, width - 1) + "…"
                if long
                else " " * (width - cell_len(text)) + text
                if right
                else text
            )
            pieces.append(set_cell_size(shown, width))
        return Strip([Segment("  ".join(pieces), style)]).adjust_cell_length(self._width, style)

    def _follow(self) -> None:
        """Scroll so that the cursor is visible, below the head."""
        height = max(1, self.size.height - 1)
        top = self.scroll_offset.y
        if self.cursor < top:
            self.scroll_to(y=self.cursor, animate=False)
        elif self.cursor >= top + height:
            self.scroll_to(y=self.cursor - height + 1, animate=False)

    def move_to(self, index: int) -> None:
        """Move the cursor."""
        index = max(0, min(index, self.source.count() - 1))
        if index != self.cursor:
            self.cursor = index
            self.post_message(self.Moved(self, index))
        self._follow()
        self.refresh()

    def action_move(self, by: int) -> None:
        """One line up or down."""
        self.move_to(self.cursor + by)

    def action_page(self, by: int) -> None:
        """One screen up or down."""
        self.move_to(self.cursor + by * max(1, self.size.height - 2))

    def action_end(self, last: int) -> None:
        """The first or the last line."""
        self.move_to(last * self.source.count())

    def action_choose(self) -> None:
        """Post Chosen for the line of the cursor."""
        if self.source.count():
            self.post_message(self.Chosen(self, self.cursor))

    def on_click(self, event: events.Click) -> None:
        """Select the line; a second click on it chooses it."""
        if event.y == 0:
            at = 0
            for i, (_, width, _) in enumerate(self._heads):
                at += width + 2
                if event.x < at:
                    self.post_message(self.HeadClicked(self, i))
                    return
            return
        index = event.y - 1 + self.scroll_offset.y
        if index >= self.source.count():
            return
        again = index == self.cursor
        self.move_to(index)
        if again:
            self.action_choose()
