"""The result of a sweep."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from polyquant.analysis.sweep import advice
from polyquant.analysis.sweep.advice import Advice, Limits
from polyquant.analysis.sweep.trials import Trial
from polyquant.errors import printable
from polyquant.tables import Row, Table, size

__all__ = ["Sweep"]


@dataclass(frozen=True, slots=True, repr=False)
class Sweep:
    """The result of `sweep`: the source as a trial of its own, the candidates in the requested order.

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
            (r["candidate"], size(r["bytes"]) if r["bytes"] else "", *(_short(r[key]) for key in _SHOWN), r["reason"])
            for r in self.rows()
        ]
        columns = ("candidate", "size", *_SHOWN, "reason")
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
            "seconds": self.seconds,
            "rows": self.rows(),
        }

    def write_report(self, path: Path | str, *, overwrite: bool = False) -> int:
        """Write the page of `polyquant report` about the trials; return its size. Raises PlanError, UnsupportedError
        without the extra `report`.
        """
        from polyquant.analysis.report.page import page, refuse_existing
        from polyquant.analysis.sweep.overview import overview
        from polyquant.storage.one_file import write_file

        refuse_existing(Path(path), overwrite=overwrite)
        content = page(overview(self)).encode()
        write_file(Path(path), content, overwrite=overwrite)
        return len(content)


_SHOWN = ("bpw", "perplexity", "kl", "tokens_per_second", "prompt_tokens_per_second")


def _short(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else f"{value:.4g}"
