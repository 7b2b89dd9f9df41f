"""The base of the panes: a list that is filled when it is first shown, and a search field above it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from textual import on
from textual.app import ComposeResult
from textual.containers import Container

from polyquant.errors import printable
from polyquant.integrations.tui.rows import Rows
from polyquant.integrations.tui.search import Search
from polyquant.integrations.tui.sources import Fixed, Source, Text

if TYPE_CHECKING:
    from polyquant.integrations.tui.jobs import Job
    from polyquant.integrations.tui.models import Models

__all__ = ["Host", "Pane"]


class Host(Protocol):
    """The application, as the panes use it."""

    models: Callable[[], Models]

    @property
    def shown(self) -> tuple[str, ...]:
        """The paths of the one or two models."""

    def say(self, text: str) -> None:
        """Show one line of status."""

    def start(
        self,
        kind: str,
        title: str,
        work: Callable[[Job], Any],
        then: Callable[[Any], None],
        failed: Callable[[str], None] | None = None,
    ) -> None:
        """Run work(job) in a thread, then call then(result), or failed(message)."""

    def copy(self, text: str) -> None:
        """Copy text to the clipboard."""


class Pane(Container):
    """A list. Subclasses define `load` and `summary`, and `select` if they can be searched."""

    title = ""

    def __init__(self, name: str) -> None:
        super().__init__(id=name)
        self.rows = Rows(Fixed(("",), ()))
        self.pattern = ""
        self._asked_for = False

    def compose(self) -> ComposeResult:
        """The list."""
        yield self.rows

    @property
    def browser(self) -> Host:
        """The application."""
        app: Host = self.app
        return app

    def enter(self) -> None:
        """Take the keyboard; load when shown for the first time."""
        self.rows.focus()
        if not self._asked_for:
            self._asked_for = True
            self.load()
        else:
            self.browser.say(self.summary())

    def load(self) -> None:
        """Start reading; ends with `fill`."""

    def fill(self, source: Source, cursor: int = 0) -> None:
        """Show a list."""
        self.rows.source = source
        self.rows.reload(cursor)
        self.browser.say(self.summary())

    def fail(self, problem: str) -> None:
        """Show an error in place of the list."""
        self.rows.source = Text("", problem)
        self.rows.reload(0)
        self.browser.say("")

    def summary(self) -> str:
        """One line about the list."""
        return ""

    # ---------------------------------------------------------------- search

    def select(self) -> None:
        """Apply the pattern. Raises ValueError for an invalid one."""

    def action_search(self) -> None:
        """Open the search field."""
        if not self.query(Search):
            self.mount(Search(self.pattern), before=0)

    @on(Search.Asked)
    def _asked(self, event: Search.Asked) -> None:
        event.stop()
        before, self.pattern = self.pattern, event.pattern
        try:
            self.select()
        except ValueError as problem:
            self.pattern = before
            self.browser.say(printable(problem))
        if event.close:
            self.query(Search).remove()
            self.rows.focus()

    def clear_search(self) -> bool:
        """Show everything again. Returns False if there was no search."""
        if not self.pattern:
            return False
        self.pattern = ""
        self.select()
        return True
