"""The search field above a list."""

from __future__ import annotations

from typing import ClassVar

from textual import on
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.widgets import Input

__all__ = ["Search"]

_LONGEST = 1000


class Search(Input):
    """Posts Asked while the user types; Enter keeps the pattern, Escape clears it."""

    DEFAULT_CSS = """
    Search { border: none; height: 1; padding: 0 1; background: $panel; }
    Search:focus { border: none; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "leave(False)", "Clear"),
        Binding("down", "leave(True)", "To the list", show=False),
    ]

    class Asked(Message):
        """The pattern changed. close: the user left the field."""

        def __init__(self, pattern: str, close: bool) -> None:
            super().__init__()
            self.pattern, self.close = pattern, close

    def __init__(self, pattern: str) -> None:
        hint = "words, a glob such as *attn_q*, or re:REGEX"
        super().__init__(pattern, placeholder=hint, max_length=_LONGEST, id="search", select_on_focus=False)

    def on_mount(self) -> None:
        """Take the keyboard."""
        self.focus()

    @on(Input.Changed)
    def _changed(self, event: Input.Changed) -> None:
        event.stop()
        self.post_message(self.Asked(event.value, close=False))

    @on(Input.Submitted)
    def _submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self.post_message(self.Asked(event.value, close=True))

    def action_leave(self, keep: bool) -> None:
        """Go back to the list."""
        self.post_message(self.Asked(self.value if keep else "", close=True))
