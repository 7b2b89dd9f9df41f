"""The findings of `polyquant validate`, on demand."""

from __future__ import annotations

from typing import Any, ClassVar

from textual import on
from textual.binding import Binding, BindingType

from polyquant.errors import printable
from polyquant.integrations.tui.jobs import Job
from polyquant.integrations.tui.pane import Pane
from polyquant.integrations.tui.rows import Rows
from polyquant.integrations.tui.screens import Viewer
from polyquant.integrations.tui.sources import Fixed, Text

__all__ = ["Findings"]


class Findings(Pane):
    """Headers are checked when the pane is opened, data only when asked for."""

    title = "Findings"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("v", "check(False)", "Check headers"),
        Binding("V", "check(True)", "Check all data"),
        Binding("y", "copy", "Copy", show=False),
    ]

    def __init__(self) -> None:
        super().__init__("findings")
        self.found: list[tuple[int, Any]] = []
        self._checked = ""

    def load(self) -> None:
        """Check headers and small files."""
        self.action_check(False)

    def action_check(self, every: bool) -> None:
        """Check headers, or all data."""
        models, count = self.browser.models, len(self.browser.shown)

        def work(job: Job) -> list[tuple[int, Any]]:
            return [(i, f) for i in range(count) for f in models().findings(i, every, job.tick)]

        def then(found: list[tuple[int, Any]]) -> None:
            self.found, self._checked = found, "all data" if every else "headers and small files"
            two = count > 1
            lines = [
                (
                    *(("AB"[i],) if two else ()),
                    f.severity.value,
                    f.code,
                    printable(f.tensor or f.file or "", 200),
                    printable(f.message, 400),
                )
                for i, f in found
            ]
            titles = (*(("model",) if two else ()), "severity", "code", "tensor", "message")
            warn = frozenset(i for i, (_, f) in enumerate(found) if f.severity.value == "error")
            self.fill(Fixed(titles, lines, wide=len(titles) - 1, warn=warn))

        self.browser.start("findings", "checking", work, then, self.fail)

    def summary(self) -> str:
        """The extent of the check and its result."""
        if not self._checked:
            return ""
        count = f"{len(self.found):,} findings" if self.found else "no findings"
        more = " · V checks all data" if self._checked != "all data" else ""
        return f"{count} in {self._checked}{more}" + (" · Enter explains" if self.found else "")

    @on(Rows.Chosen)
    def _chosen(self, event: Rows.Chosen) -> None:
        """Show the whole finding and its explanation."""
        event.stop()
        _, finding = self.found[event.index]

        def work(job: Job) -> str:
            from polyquant.analysis.explain import all_codes

            return all_codes().get(finding.code, "")

        def then(explanation: str) -> None:
            text = f"{finding}\n\n{explanation}"
            self.app.push_screen(Viewer(Text(finding.code, text), copied=text))
            self.browser.say(self.summary())

        self.browser.start("explain", "explaining", work, then)

    def action_copy(self) -> None:
        """Copy a finding."""
        if self.rows.cursor < len(self.found):
            self.browser.copy(str(self.found[self.rows.cursor][1]))
