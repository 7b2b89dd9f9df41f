"""The results of a sweep: a trial for each candidate, and the whole."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from polyquant.analysis.evaluate import Divergence, Evaluation, Mean, Score
from polyquant.analysis.speed import Speed
from polyquant.analysis.sweep import advice
from polyquant.analysis.sweep.advice import Advice, Limits
from polyquant.conversion.report import StepReport
from polyquant.errors import printable
from polyquant.findings import Finding, Findings, Severity
from polyquant.ops.metrics import ErrorSums
from polyquant.tables import Table, size

__all__ = ["Measurement", "Status", "Sweep", "Trial"]

Status = Literal["measured", "failed", "skipped"]


@dataclass(frozen=True, slots=True)
class Measurement:
    """The figures of one model, from a process of its own."""

    format: str
    architecture: str
    weights: int
    evaluation: Evaluation
    speed: Speed
    findings: Findings = field(default_factory=Findings)

    def to_json(self) -> dict[str, Any]:
        """The values as JSON-compatible types."""
        return {
            "format": self.format,
            "architecture": self.architecture,
            "weights": self.weights,
            "evaluation": asdict(self.evaluation),
            "speed": self.speed.to_json(),
            "findings": [[f.code, f.severity.value, f.message, f.tensor, f.file] for f in self.findings],
        }

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Measurement:
        """The inverse of `to_json`. Raises KeyError, TypeError, ValueError for other values."""
        findings = Findings([Finding(c, Severity(s), m, t, f) for c, s, m, t, f in entry["findings"]])
        return cls(
            entry["format"], entry["architecture"], entry["weights"], _evaluation(entry["evaluation"]),
            Speed(**entry["speed"]), findings,
        )  # fmt: skip


def _evaluation(entry: Mapping[str, Any]) -> Evaluation:
    """The inverse of `asdict`."""
    divergence = entry["divergence"]
    means = {"log_ratio", "kl", "top_1"}
    found = None
    if divergence is not None:
        values = {k: Mean(**v) if k in means else v for k, v in divergence.items()}
        found = Divergence(**{**values, "layers": ()})
    return Evaluation(
        **{**entry, "model": _score(entry["model"]), "reference": _score(entry["reference"]), "divergence": found}
    )


def _score(entry: Mapping[str, Any] | None) -> Any:
    if entry is None:
        return None
    return Score(**{**entry, "nll": Mean(**entry["nll"]), "notes": tuple(entry["notes"])})


@dataclass(frozen=True, slots=True)
class Trial:
    """One candidate. status: "measured", "failed" or "skipped", with the reason for the last two.

    nbytes: of the tensors, predicted unless measured; path: of the output, None if it was not kept; seconds: to make
    it; command: which makes it alone; steps: its tensors with their errors.
    """

    name: str
    status: Status
    reason: str = ""
    nbytes: int | None = None
    path: str | None = None
    seconds: float | None = None
    command: str = ""
    measurement: Measurement | None = None
    steps: tuple[StepReport, ...] = ()

    @property
    def bpw(self) -> float | None:
        """Effective bits per weight; None if it was not measured."""
        return None if self.measurement is None else self.measurement.evaluation.model.bpw

    @property
    def perplexity(self) -> Mean | None:
        """Perplexity with its standard error; None if it was not measured."""
        return None if self.measurement is None else self.measurement.evaluation.model.perplexity

    @property
    def divergence(self) -> Divergence | None:
        """Divergence from the source; None if it was not measured, and for the source."""
        return None if self.measurement is None else self.measurement.evaluation.divergence

    @property
    def kl(self) -> float | None:
        """Mean KL divergence from the source in nats per token."""
        return None if self.divergence is None else self.divergence.kl.value

    @property
    def speed(self) -> Speed | None:
        """Speed and memory on this machine; None if it was not measured."""
        return None if self.measurement is None else self.measurement.speed

    @property
    def error(self) -> ErrorSums:
        """Error sums of the weights."""
        return sum((s.error for s in self.steps if s.error is not None), ErrorSums())

    def row(self, *, efficient: bool) -> dict[str, Any]:
        """The figures as a flat row; None where nothing was measured."""
        found, speed, perplexity = self.divergence, self.speed, self.perplexity
        return {
            "candidate": self.name,
            "status": self.status,
            "efficient": efficient,
            "bytes": self.nbytes,
            "bpw": self.bpw,
            "perplexity": perplexity.value if perplexity else None,
            "perplexity_error": perplexity.error if perplexity else None,
            "kl": found.kl.value if found else None,
            "kl_error": found.kl.error if found else None,
            "kl_99": found.kl_99 if found else None,
            "top_1": found.top_1.value if found else None,
            "tokens_per_second": speed.decode if speed else None,
            "prompt_tokens_per_second": speed.prompt if speed else None,
            "load_seconds": speed.load if speed else None,
            "peak_memory": speed.memory if speed else None,
            "seconds": self.seconds,
            "path": self.path,
            "reason": self.reason,
            "command": self.command,
        }


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

    def rows(self) -> list[dict[str, Any]]:
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
