"""The metadata of the models: every key, long values in a viewer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar

from textual import on
from textual.binding import Binding, BindingType

from polyquant.errors import printable
from polyquant.integrations.tui.jobs import Job
from polyquant.integrations.tui.listing import matcher
from polyquant.integrations.tui.pane import Pane
from polyquant.integrations.tui.rows import Rows
from polyquant.integrations.tui.screens import Viewer
from polyquant.integrations.tui.sources import Fixed, Items, Text

__all__ = ["Metadata"]

_CELL = 400
_ITEM = 2000
_ABSENT = object()


def _is_array(value: Any) -> bool:
    return not isinstance(value, str | bytes | Mapping) and hasattr(value, "__len__") and hasattr(value, "__getitem__")


def _word(value: Any) -> str:
    """A single value."""
    value = value.item() if hasattr(value, "item") and not _is_array(value) else value
    return json.dumps(value) if isinstance(value, bool) or value is None else str(value)


def _short(value: Any) -> str:
    """A value in one cell; a long array by its length and first entries."""
    if value is _ABSENT:
        return "-"
    if _is_array(value):
        n = len(value)
        head = ", ".join(printable(_word(value[i]), 40) for i in range(min(n, 6)))
        return f"{n:,} entries: {head}, …" if n > 6 else f"[{head}]"
    return printable(_word(value), _CELL)


def _differing(a: dict[str, Any], b: dict[str, Any]) -> set[str]:
    """The keys whose values differ, or that only one has."""

    def same(x: Any, y: Any) -> bool:
        if _is_array(x) and _is_array(y):
            return len(x) == len(y) and all(bool(v == w) for v, w in zip(x, y, strict=True))
        return type(x) is type(y) and bool(x == y)

    return {key for key in {**a, **b} if key not in a or key not in b or not same(a[key], b[key])}


class Metadata(Pane):
    """Keys and values; of two models side by side, with the differing keys highlighted."""

    title = "Metadata"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "search", "Search"),
        Binding("x", "differing", "Differing only"),
        Binding("y", "copy(True)", "Copy value", show=False),
        Binding("Y", "copy(False)", "Copy key", show=False),
    ]

    def __init__(self) -> None:
        super().__init__("metadata")
        self.values: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.differs: set[str] = set()
        self.differing = False

    def load(self) -> None:
        """Read the values of all models."""
        models, count = self.browser.models, len(self.browser.shown)

        def work(job: Job) -> tuple[list[dict[str, Any]], set[str]]:
            values = [models().metadata(i) for i in range(count)]
            return values, _differing(*values) if len(values) == 2 else set()

        def then(result: tuple[list[dict[str, Any]], set[str]]) -> None:
            self.values, self.differs = result
            self.select()

        self.browser.start("metadata", "reading the metadata", work, then, self.fail)

    def select(self) -> None:
        """Apply the search."""
        test = matcher(self.pattern)
        known = dict.fromkeys(key for values in self.values for key in values)
        self.keys = [key for key in known if test(key) and (not self.differing or key in self.differs)]
        lines = [(printable(key, 200), *(_short(v.get(key, _ABSENT)) for v in self.values)) for key in self.keys]
        warn = frozenset(i for i, key in enumerate(self.keys) if key in self.differs)
        titles = ("key", "value") if len(self.values) == 1 else ("key", "A", "B")
        self.fill(Fixed(titles, lines, wide=len(titles) - 1, warn=warn))

    def summary(self) -> str:
        """The number of keys."""
        differing = f" · {len(self.differs.intersection(self.keys)):,} differ" if len(self.values) > 1 else ""
        return f"{len(self.keys):,} keys{differing} · Enter shows a value, y copies it"

    def action_differing(self) -> None:
        """Show all keys, or those whose values differ."""
        self.differing = not self.differing
        self.select()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Only two models differ."""
        return action != "differing" or len(self.browser.shown) > 1

    @on(Rows.Chosen)
    def _chosen(self, event: Rows.Chosen) -> None:
        """Show the value; of two models the one that has it, the second if they differ."""
        event.stop()
        key = self.keys[event.index]
        held = [values[key] for values in self.values if key in values]
        value = held[-1] if key in self.differs else held[0]
        title = printable(key, 100)
        if _is_array(value):
            self.app.push_screen(Viewer(Items(title, len(value), lambda i: printable(_word(value[i]), _ITEM))))
        else:
            text = json.dumps(value, indent=1, default=str) if isinstance(value, Mapping) else _word(value)
            self.app.push_screen(Viewer(Text(title, text), copied=text))

    def action_copy(self, value: bool) -> None:
        """Copy the key or its value."""
        if self.rows.cursor < len(self.keys):
            key = self.keys[self.rows.cursor]
            held = [values[key] for values in self.values if key in values]
            self.browser.copy((_short(held[0]) if _is_array(held[0]) else _word(held[0])) if value else key)
