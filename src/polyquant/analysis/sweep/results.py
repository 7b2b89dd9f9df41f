"""The result of a sweep."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from polyquant.analysis.report.figures import ReportPage
from polyquant.analysis.sweep import advice
from polyquant.analysis.sweep.advice import Advice, Limits
from polyquant.analysis.sweep.trials import Trial
from polyquant.errors import listed, printable
from polyquant.tables import Row, Table, size

__all__ = ["Sweep"]

_STEADY = 0.15
"""Largest spread of the decoding rates on a quiet machine."""


@dataclass(frozen=True, slots=True, repr=False)
class Sweep:
    """The result of `sweep`: reference, the trial of the source, and those of the candidates in the requested order.

    seconds: of this run; machine: processor, threads and engine.
    """

    source: str
    text: str
    work: str
    machine: str
    reference: Trial
    trials: tuple[Trial, ...]
    limits: Limits
    seconds: float

    def __repr__(self) -> str:
        done = sum(t.status == "measured" for t in self.trials)
        best = f", recommended: {printable(self.recommended.name)}" if self.recommended is not None else ""
        return f"<Sweep {printable(self.source)}: {done} of {len(self.trials)} candidates measured{best}>"

    def _repr_html_(self) -> str:
        rows = [
            (
                t.name, size(t.nbytes) if t.nbytes else "", _short(t.bpw),
                _short(t.perplexity.value if t.perplexity else None), _short(t.kl),
                _short(t.speed.decode if t.speed else None), size(t.speed.memory) if t.speed else "", t.reason,
            )
            for t in (self.reference, *self.trials)
        ]  # fmt: skip
        columns = ("candidate", "size", "bits per weight", "perplexity", "KL", "tokens/s", "memory", "reason")
        return Table(repr(self).strip("<>"), columns, rows, len(rows), (self.advice.sentence,)).html()

    @property
    def advice(self) -> Advice:
        """The recommendation and its reason."""
        return advice.choose(self.trials, self.limits)

    @property
    def recommended(self) -> Trial | None:
        """The smallest candidate within the limits; None if there is none."""
        return self.advice.smallest

    @property
    def fastest(self) -> Trial | None:
        """The fastest candidate within the limits; None if there is none."""
        return self.advice.fastest

    @property
    def disturbed(self) -> str:
        """A warning if repetitions of a speed measurement differ much; "" if they do not."""
        spreads = {t.name: t.speed.spread for t in (self.reference, *self.trials) if t.speed is not None}
        unsteady = [name for name, spread in spreads.items() if spread > _STEADY]
        if not unsteady:
            return ""
        worst = f"up to {100 * max(spreads.values()):.0f} %"
        return f"speeds of {listed(unsteady)} varied by {worst} between repetitions: other programs were running"

    @property
    def efficient(self) -> frozenset[str]:
        """Names of the candidates that no other one beats in both size and divergence."""
        return advice.efficient(self.trials)

    def rows(self) -> list[Row]:
        """A flat row for the source and each candidate, which `pandas.DataFrame` takes."""
        named = self.efficient
        return [self.reference.row(efficient=False), *(t.row(efficient=t.name in named) for t in self.trials)]

    def to_json(self) -> dict[str, Any]:
        """The values as JSON-compatible types."""
        chosen = self.advice
        return {
            "source": self.source,
            "text": self.text,
            "work": self.work,
            "machine": self.machine,
            "limits": asdict(self.limits),
            "recommended": chosen.smallest.name if chosen.smallest else None,
            "fastest": chosen.fastest.name if chosen.fastest else None,
            "advice": chosen.sentence,
            "warning": self.disturbed,
            "seconds": self.seconds,
            "rows": self.rows(),
        }

    def report(self) -> ReportPage:
        """The measured candidates side by side: figures, and the page of `polyquant report`."""
        from polyquant.analysis.sweep.overview import overview

        return ReportPage(
            overview(
                self.reference, self.trials, self.efficient, text=self.text, machine=self.machine,
                advice=self.advice.sentence, warning=self.disturbed,
            )
        )  # fmt: skip

    def write_report(self, path: Path | str, *, overwrite: bool = False) -> int:
        """Write the page of `polyquant report` about the trials; return its size. Raises PlanError, UnsupportedError
        without the extra `report`.
        """
        return self.report().save(path, overwrite=overwrite).stat().st_size


def _short(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else f"{value:.4g}"
