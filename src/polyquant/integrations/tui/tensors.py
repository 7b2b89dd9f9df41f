"""The list of tensors, with the panel of the tensor under the cursor."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap
from typing import TYPE_CHECKING, Any, ClassVar

from rich.text import Text
from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.widget import Widget

from polyquant.errors import printable
from polyquant.integrations.tui.columns import Column, cells, columns_of, fitted
from polyquant.integrations.tui.details import bars, facts, figures
from polyquant.integrations.tui.jobs import Job
from polyquant.integrations.tui.listing import SORTS, Line, Listing, Measured
from polyquant.integrations.tui.pane import Pane
from polyquant.integrations.tui.rows import Rows
from polyquant.integrations.tui.screens import Choice

if TYPE_CHECKING:
    from polyquant.analysis.statistics import Statistics

__all__ = ["Tensors"]

_BAR_WIDTH = 41


class _Lines:
    """The visible tensors as the content of a list."""

    def __init__(self, listing: Listing) -> None:
        self.listing = listing
        self.columns = columns_of(listing)
        self.fitted: list[tuple[Column, int]] = []

    def heads(self, width: int) -> list[tuple[str, int, bool]]:
        self.fitted = fitted(self.columns, width)
        order, arrow = self.listing.sort, "▴" if self.listing.backwards else "▾"
        return [
            (column.title + (arrow if column.sort == order and column.marked else ""), n, column.right)
            for column, n in self.fitted
        ]

    def count(self) -> int:
        return len(self.listing.lines)

    def cells(self, index: int) -> list[str]:
        return cells(self.listing, self.listing.lines[index], self.fitted)

    def style(self, index: int) -> str:
        line = self.listing.lines[index]
        if not line.leaf:
            return "rows--group"
        entry = self.listing.entries[line.members[0]]
        return "rows--warn" if self.listing.two and not entry.comparable else ""


class Details(Widget):
    """The panel: facts, statistics, and a histogram."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {"details--bars"}

    DEFAULT_CSS = """
    Details { height: 9; border-top: solid $panel-lighten-2; padding: 0 1; }
    Details .details--bars { color: $accent; }
    """

    def __init__(self, owner: Tensors) -> None:
        super().__init__(id="details")
        self.owner = owner

    def render(self) -> Text:
        """Lay out for the size of the panel: the histogram to the right of the figures, or below them."""
        width, height = self.size
        line = self.owner.current
        if line is None:
            return Text("no tensor matches" if self.owner.listing.entries else "")
        found = self.owner.measured.get(line.key, ()) if line.leaf else ()
        parts = self.owner.parts.get(line.key, ()) if line.leaf else ()
        beside = bool(found) and width >= 2 * _BAR_WIDTH - 6
        left = width - _BAR_WIDTH - 2 if beside else width
        lines = facts(self.owner.listing, line, left, parts, brief=beside)
        if line.key in self.owner.problems:
            lines += ["", *wrap(printable(self.owner.problems[line.key], 600), max(8, left))]
        elif line.leaf and not found:
            lines += ["", "Enter: statistics of a sample   a: of all values"]
        texts = [figures(one) for one in found]
        used = 0 if beside else len(lines) + sum(len(text) + 1 for text in texts)
        tall = max(1, min(8, (height - used) // max(1, len(found)) - 1))
        pictures = []
        for label, one, text in zip("AB", found, texts, strict=False):
            text[0] = f"{label}: {text[0]}" if len(found) > 1 else text[0]
            picture = bars(one, tall)
            lines += text if beside else ["", *text, *picture]
            pictures += picture
        if beside:
            lines += [""] * (len(pictures) - len(lines))
            pictures += [""] * (len(lines) - len(pictures))
            lines = [f"{text[:left]:{left}}  {picture}" for text, picture in zip(lines, pictures, strict=True)]
        drawn = Text("\n".join(lines[:height]), no_wrap=True, overflow="ellipsis")
        drawn.highlight_regex("[▁▂▃▄▅▆▇█]+", self.get_component_rich_style("details--bars", partial=True))
        return drawn


class Tensors(Pane):
    """The list, the search field and the panel."""

    title = "Tensors"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "search", "Search"),
        Binding("f", "filter", "Type"),
        Binding("s", "sort", "Sort"),
        Binding("r", "reverse", "Reverse", show=False),
        Binding("t", "tree", "Tree"),
        Binding("right,l", "open(True)", "open", show=False),
        Binding("left,h", "open(False)", "close", show=False),
        Binding("plus", "open_all(True)", "open all", show=False),
        Binding("minus", "open_all(False)", "close all", show=False),
        Binding("a", "measure(True)", "All values", show=False),
        Binding("c", "compare(False)", "Compare"),
        Binding("C", "compare(True)", "Compare all", show=False),
        Binding("y", "copy(False)", "Copy", show=False),
        Binding("Y", "copy(True)", "Copy row", show=False),
    ]

    class Compared(Message):
        """The error of one tensor is known."""

        def __init__(self, name: str, measured: Measured) -> None:
            super().__init__()
            self.name, self.measured = name, measured

    def __init__(self) -> None:
        super().__init__("tensors")
        self.listing = Listing(())
        self.rows.source = _Lines(self.listing)
        self.measured: dict[str, Sequence[Statistics]] = {}
        self.parts: dict[str, list[str]] = {}
        self.problems: dict[str, str] = {}
        self._dirty = False

    def compose(self) -> ComposeResult:
        """The list above the panel."""
        yield self.rows
        yield Details(self)

    @property
    def current(self) -> Line | None:
        """The line under the cursor."""
        lines = self.listing.lines
        return lines[self.rows.cursor] if self.rows.cursor < len(lines) else None

    def show(self, listing: Listing) -> None:
        """Show other tensors."""
        self.listing = listing
        self.measured.clear()
        self.parts.clear()
        self.problems.clear()
        self.rows.source = _Lines(listing)
        self.refresh_bindings()
        self._shown(0)

    def _shown(self, cursor: int | None = None) -> None:
        self.rows.reload(cursor)
        self.query_one(Details).refresh()
        self.browser.say(self.summary())

    def summary(self) -> str:
        """One line about the list."""
        listing = self.listing
        words = [f"{len(listing.shown):,} of {len(listing.entries):,} tensors"]
        if listing.search:
            words.append(f"search: {printable(listing.search, 40)}")
        if listing.codec is not None:
            words.append(f"type: {listing.codec}")
        if listing.sort != "file order" or listing.backwards:
            words.append(f"by {listing.sort}{' (reversed)' if listing.backwards else ''}")
        if listing.two:
            words.append(f"{len(listing.errors):,} compared" if listing.errors else "c: compare, C: compare all shown")
        return " · ".join(words)

    def _keeping(self, change: Any) -> None:
        """Apply a change; the cursor stays on its tensor if that is still visible."""
        before = self.current
        change()
        keys = [line.key for line in self.listing.lines] if before is not None else []
        self._shown(keys.index(before.key) if before is not None and before.key in keys else 0)

    @on(Rows.Moved)
    def _moved(self, event: Rows.Moved) -> None:
        event.stop()
        self.query_one(Details).refresh()

    @on(Rows.Chosen)
    def _chosen(self, event: Rows.Chosen) -> None:
        event.stop()
        line = self.current
        if line is None:
            return
        if line.leaf:
            self.action_measure(False)
        else:
            self._keeping(lambda: self.listing.toggle(line))

    @on(Rows.HeadClicked)
    def _head(self, event: Rows.HeadClicked) -> None:
        event.stop()
        columns = self.rows.source.fitted  # type: ignore[attr-defined]
        if sort := columns[event.index][0].sort:
            self.listing.backwards = self.listing.sort == sort and not self.listing.backwards
            self.listing.sort = sort
            self._keeping(self.listing.select)

    def on_resize(self, event: events.Resize) -> None:
        """Redraw the panel."""
        self.query_one(Details).refresh()

    # ---------------------------------------------------------------- choosing what is shown

    def select(self) -> None:
        """Apply the search."""
        before, self.listing.search = self.listing.search, self.pattern
        try:
            self._keeping(self.listing.select)
        except ValueError:
            self.listing.search = before
            raise

    def action_filter(self) -> None:
        """Choose one type."""
        from polyquant.tables import size

        codecs = self.listing.codecs()
        lines = [("all types", "", ""), *((c, f"{n:,}", size(nbytes)) for c, n, nbytes in codecs)]

        def chosen(index: int | None) -> None:
            if index is not None:
                self.listing.codec = codecs[index - 1][0] if index else None
                self._keeping(self.listing.select)

        self.app.push_screen(Choice("Show tensors of one type", ("type", ">tensors", ">size"), lines), chosen)

    def action_sort(self) -> None:
        """Choose an order."""
        orders = [name for name in SORTS if name != "error" or self.listing.two]

        def chosen(index: int | None) -> None:
            if index is not None:
                self.listing.sort, self.listing.backwards = orders[index], False
                self._keeping(self.listing.select)

        self.app.push_screen(Choice("Sort by", ("order",), [(name,) for name in orders]), chosen)

    def action_reverse(self) -> None:
        """Reverse the order."""
        self.listing.backwards = not self.listing.backwards
        self._keeping(self.listing.select)

    def action_tree(self) -> None:
        """Tree or flat list."""
        self.listing.tree = not self.listing.tree
        self._keeping(self.listing.fold)

    def action_open(self, is_open: bool) -> None:
        """Open a group; or close it, or the one around a tensor."""
        line = self.current
        if line is None or not self.listing.tree:
            return
        if not line.leaf and line.is_open != is_open:
            self._keeping(lambda: self.listing.toggle(line))
        elif not is_open and line.depth:
            above = [i for i in range(self.rows.cursor) if self.listing.lines[i].depth < line.depth]
            self.rows.move_to(above[-1])

    def action_open_all(self, is_open: bool) -> None:
        """Open or close all groups."""
        self._keeping(lambda: self.listing.open_all(is_open))

    # ---------------------------------------------------------------- measuring

    def action_measure(self, every: bool) -> None:
        """Statistics of the tensor under the cursor."""
        line, models = self.current, self.browser.models
        if line is None or not line.leaf:
            return
        name = line.key

        def work(job: Job) -> tuple[list[Statistics], list[str]]:
            return models().statistics(name, every, job.tick), models().parts(name)

        def then(result: tuple[list[Statistics], list[str]]) -> None:
            self.measured[name], self.parts[name] = result
            self.query_one(Details).refresh()
            self.browser.say(self.summary())

        self.browser.start(
            "statistics", f"reading {printable(name, 60)}", work, then, lambda text: self._fail(name, text)
        )

    def action_compare(self, every: bool) -> None:
        """Measure the error of the tensor or group under the cursor, or of all that are shown."""
        listing, line, models = self.listing, self.current, self.browser.models
        members = listing.shown if every else () if line is None else line.members
        names = [e.name for e in (listing.entries[i] for i in members) if e.comparable and e.name not in listing.errors]
        total = len(names)

        def work(job: Job) -> int:
            for i, name in enumerate(names):

                def tick(done: int, rows: int, what: str, i: int = i) -> None:
                    job.tick(i * rows + done, total * rows, what)

                tick(0, 1, name)
                found = models().compare(name, tick)
                figures = Measured(found.error.snr, found.error.cosine, found.error.worst, found.equal_codes)
                job.send(self, self.Compared(name, figures))
            return total

        def then(result: int) -> None:
            if every:
                listing.sort, listing.backwards = "error", False
            self._keeping(listing.select)

        failed = names[0] if total == 1 else ""
        self.browser.start("compare", f"comparing {total:,} tensors", work, then, lambda text: self._fail(failed, text))

    def _fail(self, name: str, problem: str) -> None:
        """Show an error in the panel of its tensor, or as the status."""
        self.problems[name] = problem
        self.query_one(Details).refresh()
        self.browser.say(problem)

    @on(Compared)
    def _compared(self, event: Compared) -> None:
        event.stop()
        self.listing.errors[event.name] = event.measured
        if not self._dirty:  # results of small tensors come faster than a screen can be drawn
            self._dirty = True
            self.set_timer(0.2, self._redraw)

    def _redraw(self) -> None:
        self._dirty = False
        if self.listing.sort == "error":
            self._keeping(self.listing.select)
        else:
            self.rows.refresh()
        self.query_one(Details).refresh()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Comparing needs two models; opening groups a tree."""
        return self.listing.two if action == "compare" else self.listing.tree if action.startswith("open") else True

    def action_copy(self, row: bool) -> None:
        """Copy the name, or the visible cells."""
        line = self.current
        if line is None:
            return
        cells_ = self.rows.source.cells(self.rows.cursor)
        self.browser.copy("\t".join([line.key, *cells_[1:]]) if row else line.key)
