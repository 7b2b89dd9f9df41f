"""Screens over the panes: a choice, a long value or text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Static

from polyquant.errors import escaped
from polyquant.integrations.tui.rows import Rows
from polyquant.integrations.tui.sources import Fixed, Source

__all__ = ["Choice", "Viewer"]

_LINES = 16


class _Over(ModalScreen[int | None]):
    DEFAULT_CSS = """
    _Over { align: center middle; }
    _Over > Vertical { background: $surface; border: round $primary; padding: 0 1; }
    _Over .title { height: 1; text-style: bold; }
    _Over .keys { height: 1; color: $text-muted; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q", "close", "Close")]

    def action_close(self) -> None:
        """Close without a choice."""
        self.dismiss(None)


class Choice(_Over):
    """Choose one line; the result is its index, None for none."""

    DEFAULT_CSS = "Choice > Vertical { width: 56; max-width: 90%; height: auto; max-height: 90%; }"

    def __init__(self, title: str, titles: Sequence[str], lines: Sequence[Sequence[str]], at: int = 0) -> None:
        super().__init__()
        self._title, self._source, self._at = title, Fixed(titles, lines), at

    def compose(self) -> ComposeResult:
        """A title and the list."""
        with Vertical():
            yield Static(self._title, classes="title", markup=False)
            rows = Rows(self._source, cursor=self._at)
            rows.styles.height = min(len(self._source.lines) + 1, _LINES)
            yield rows
            yield Static("Enter chooses, Escape closes", classes="keys", markup=False)

    @on(Rows.Chosen)
    def _chosen(self, event: Rows.Chosen) -> None:
        self.dismiss(event.index)


class Viewer(_Over):
    """Show a long value or text. copied: what `y` copies."""

    DEFAULT_CSS = "Viewer > Vertical { width: 100%; max-width: 120; height: 100%; }"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("y", "copy", "Copy")]

    def __init__(self, source: Source, copied: str = "") -> None:
        super().__init__()
        self._source, self._copied = source, copied

    def compose(self) -> ComposeResult:
        """The lines."""
        with Vertical():
            yield Rows(self._source)
            yield Static("Escape closes" + (", y copies" if self._copied else ""), classes="keys", markup=False)

    def action_copy(self) -> None:
        """Copy the whole text, escaped."""
        if self._copied:
            self.app.copy_to_clipboard("\n".join(map(escaped, self._copied.split("\n"))))
