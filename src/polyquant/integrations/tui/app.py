"""The application: panes, keys, jobs and errors."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from rich.text import Text
from textual import events, on
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container
from textual.widget import Widget
from textual.widgets import Footer, Static

from polyquant.errors import PolyquantError, escaped, printable
from polyquant.integrations.tui.headers import Headers
from polyquant.integrations.tui.jobs import Done, Job, Jobs, Progressed
from polyquant.integrations.tui.listing import Listing
from polyquant.integrations.tui.pane import Pane
from polyquant.integrations.tui.tensors import Tensors
from polyquant.tables import size

if TYPE_CHECKING:
    from polyquant.integrations.tui.models import Models

__all__ = ["Browser"]

_TITLES = {
    "tensors": "Tensors",
    "metadata": "Metadata",
    "tokens": "Tokenizer",
    "template": "Template",
    "findings": "Findings",
}
_WIDE = 110
"""Columns from which on the panel is to the right of the list."""


class _Tabs(Widget):
    """The names of the panes on one line."""

    DEFAULT_CSS = "_Tabs { height: 1; background: $panel; }"

    def __init__(self) -> None:
        super().__init__(id="tabs")
        self.active = "tensors"

    def render(self) -> Text:
        """Draw; the active pane is reversed."""
        text = Text()
        for i, (name, title) in enumerate(_TITLES.items()):
            text.append(f" {i + 1} {title} ", "reverse bold" if name == self.active else "")
        return text

    def on_click(self, event: events.Click) -> None:
        """Show the pane under the mouse."""
        at = 0
        for name, title in _TITLES.items():
            at += len(title) + 4
            if event.x < at:
                browser: Any = self.app
                browser.action_pane(name)
                return


class Browser(App[BaseException]):
    """Browse models. The result of `run` is the error that ended it, None if the user quit.

    read_ahead: returns the headers that another process has read, or None.
    """

    ENABLE_COMMAND_PALETTE = False
    HORIZONTAL_BREAKPOINTS: ClassVar[list[tuple[int, str]] | None] = [(0, "-narrow"), (_WIDE, "-wide")]
    CSS = """
    #title { height: 1; background: $primary; color: $text; padding: 0 1; text-style: bold; }
    #status { height: 1; background: $panel; color: $text; padding: 0 1; }
    #panes { height: 1fr; }
    #panes > Container { display: none; }
    #panes > .active { display: block; }
    .-wide #tensors { layout: horizontal; }
    .-wide #tensors Search { dock: top; }
    .-wide #details { width: 46; height: 100%; border-top: none; border-left: solid $panel-lighten-2; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(str(i + 1), f"pane('{name}')", title, show=False) for i, (name, title) in enumerate(_TITLES.items())),
        Binding("tab", "next_pane(1)", "next", show=False, priority=True),
        Binding("shift+tab", "next_pane(-1)", "previous", show=False, priority=True),
        Binding("m", "next_model", "next model", show=False),
        Binding("d", "dark", "dark or light", show=False),
        Binding("escape", "back", "back", show=False),
        Binding("question_mark", "help", "Help"),
        Binding("q", "quit", "Quit"),
        Binding("ctrl+c", "quit", "quit", show=False, priority=True),
    ]

    def __init__(
        self,
        paths: Sequence[str],
        *,
        ternary_layout: str | None = None,
        light: bool = False,
        read_ahead: Callable[[], Headers | None] = lambda: None,
    ) -> None:
        plain = "NO_COLOR" in os.environ
        super().__init__(ansi_color=plain or None)  # with the terminal's own colors Textual can leave them all out
        dark, bright = ("ansi-dark", "ansi-light") if plain else ("textual-dark", "textual-light")
        self.themes = (bright, dark) if light else (dark, bright)
        self.theme = self.themes[0]
        self.paths, self._layout, self._read_ahead = tuple(paths), ternary_layout, read_ahead
        self.second = 1
        self.jobs = Jobs()
        self.status = ""
        self._events: asyncio.AbstractEventLoop | None = None
        self.models = self._models_of()
        self.loaded = False
        self._about = "reading headers"

    @property
    def shown(self) -> tuple[str, ...]:
        """The path of the model, or of the two that are side by side."""
        return self.paths if len(self.paths) == 1 else (self.paths[0], self.paths[self.second])

    def _models_of(self) -> Callable[[], Models]:
        """Return the function that makes the Models once, in the thread of the first job that needs them."""
        lock, shown, layout = threading.Lock(), self.shown, self._layout
        made: list[Models] = []

        def models() -> Models:
            from polyquant.integrations.tui.models import Models

            with lock:
                if not made:
                    made.append(Models(shown, layout))
                return made[0]

        return models

    # ---------------------------------------------------------------- layout

    def compose(self) -> ComposeResult:
        """Title, panes, one line of status, the keys."""
        yield Static(self._title(), id="title", markup=False)
        yield _Tabs()
        with Container(id="panes"):
            yield Tensors()
        yield Static("", id="status", markup=False)
        yield Footer(show_command_palette=False)

    def _title(self) -> str:
        if len(self.paths) == 1:
            return f"{_end_of(self.paths[0], 48)}   {self._about}"
        return f"A {_end_of(self.paths[0], 24)}   B {_end_of(self.paths[self.second], 24)}   {self._about}"

    def on_mount(self) -> None:
        """Read the headers."""
        self._events = asyncio.get_running_loop()
        self.query_one(Tensors).add_class("active")
        self._open()

    def _open(self) -> None:
        ahead, self._read_ahead = self._read_ahead, lambda: None
        models, two = self.models, len(self.shown) > 1

        def work(job: Job) -> tuple[Headers, Listing]:
            headers = ahead() or models().headers()
            return headers, Listing(headers.entries, two=two)

        self.start("headers", "reading headers", work, self._opened)

    def _opened(self, result: tuple[Headers, Listing]) -> None:
        headers, listing = result
        if listing.two:
            self._about = f"{size(listing.nbytes)} against {size(sum(e.b_nbytes for e in listing.entries))}"
        else:
            bits = 8 * listing.nbytes / max(1, sum(e.weights for e in listing.entries))
            about = [headers.format, printable(headers.architecture, 40), size(listing.nbytes), f"{bits:.2f} bits/w"]
            self._about = " · ".join(word for word in about if word)
        self.query_one("#title", Static).update(self._title())
        tensors = self.query_one(Tensors)
        tensors.show(listing)
        tensors.rows.focus()
        for note in (*headers.notes, headers.problem):
            if note:
                self.say(f"note: {note}")
        self.loaded = True

    # ---------------------------------------------------------------- jobs

    def say(self, text: str) -> None:
        """Show one line of status."""
        self.status = escaped(text)
        self.query_one("#status", Static).update(Text(self.status, no_wrap=True, overflow="ellipsis"))

    def start(
        self,
        kind: str,
        title: str,
        work: Callable[[Job], Any],
        then: Callable[[Any], None],
        failed: Callable[[str], None] | None = None,
    ) -> None:
        """Run work(job) in a thread, then call then(result), or failed(message). title: for the status, "" for none."""
        if title:
            self.say(f"{title} … (Escape cancels)")
        self.jobs.start(Job(self, kind, title, work, then, failed))

    @on(Progressed)
    def _progressed(self, event: Progressed) -> None:
        if not event.job.cancelled.is_set():
            what = f"  {printable(event.what, 60)}" if event.what else ""
            self.say(f"{event.job.title} {event.share:.0%}{what}  (Escape cancels)")

    @on(Done)
    def _done(self, event: Done) -> None:
        if not self.jobs.ended(event.job):
            return
        if event.problem is None:
            event.job.then(event.result)
        elif event.job.kind == "headers" or not isinstance(event.problem, PolyquantError | OSError | MemoryError):
            self.exit(event.problem)  # the command reports it as any other
        else:
            show = event.job.failed or self.say
            show(str(event.problem) or type(event.problem).__name__)

    def copy(self, text: str) -> None:
        """Copy text, escaped: it may be pasted into a shell."""
        self.copy_to_clipboard(escaped(text))
        self.say(f"copied {printable(text, 60)}")

    # ---------------------------------------------------------------- keys

    @property
    def pane(self) -> Pane:
        """The visible pane."""
        pane: Pane = self.query_one("#panes > .active", Pane)
        return pane

    def action_pane(self, name: str) -> None:
        """Show a pane, made on first use."""
        if not self.loaded:
            return
        panes = self.query_one("#panes")
        for pane in panes.children:
            pane.remove_class("active")
        self.query_one(_Tabs).active = name
        self.query_one(_Tabs).refresh()
        found = panes.query(f"#{name}")
        if found:
            found.first(Pane).add_class("active")
            found.first(Pane).enter()
        else:
            pane = _make(name)
            pane.add_class("active")
            panes.mount(pane)
            self.call_after_refresh(pane.enter)

    def action_next_pane(self, by: int) -> None:
        """The next or the previous pane."""
        names = list(_TITLES)
        self.action_pane(names[(names.index(str(self.pane.id)) + by) % len(names)])

    def action_next_model(self) -> None:
        """Show the next model next to the first."""
        if len(self.paths) < 3:
            self.say("m shows the next of three or more models")
        elif self.loaded:
            self.second = self.second % (len(self.paths) - 1) + 1
            self.jobs.cancel()
            self.loaded = False
            self.models = self._models_of()
            for pane in self.query(Pane):
                if pane.id != "tensors":
                    pane.remove()
            self.query_one(Tensors).add_class("active")
            self.query_one(_Tabs).active = "tensors"
            self.query_one(_Tabs).refresh()
            self._about = "reading headers"
            self.query_one("#title", Static).update(self._title())
            self._open()

    def action_dark(self) -> None:
        """Dark or light."""
        self.theme = self.themes[self.theme == self.themes[0]]

    def action_back(self) -> None:
        """Cancel jobs; without any clear the search."""
        if self.jobs.running():
            if not self.loaded:
                self.exit()
            self.say(f"cancelled: {', '.join(filter(None, self.jobs.cancel()))}")
        else:
            self.pane.clear_search()

    def action_help(self) -> None:
        """Show the keys."""
        from polyquant.integrations.tui.help_screen import help_screen

        self.push_screen(help_screen())

    # ---------------------------------------------------------------- errors

    def interrupt(self) -> None:
        """Quit because of a signal; `run` returns KeyboardInterrupt."""
        if self._events is None:
            raise KeyboardInterrupt
        self._events.call_soon_threadsafe(self.exit, KeyboardInterrupt())

    def _fatal_error(self) -> None:
        """Overrides Textual's traceback, which prints local variables unescaped: the command reports the error."""
        self.exit(self._exception)


def _end_of(path: str, most: int) -> str:
    """The end of a path, where names differ."""
    shown = escaped(path.rstrip("/"))
    return shown if len(shown) <= most else "…" + shown[1 - most :]


def _make(name: str) -> Pane:
    """Imported when first shown."""
    if name == "metadata":
        from polyquant.integrations.tui.metadata import Metadata

        return Metadata()
    if name == "findings":
        from polyquant.integrations.tui.findings import Findings

        return Findings()
    from polyquant.integrations.tui.tokens import Template, Tokens

    return Tokens() if name == "tokens" else Template()
