"""A trial: one candidate of a sweep, with its measured figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from polyquant.analysis.evaluate import Divergence, Evaluation, Mean, Score
from polyquant.analysis.speed import Speed
from polyquant.conversion.report import StepReport
from polyquant.errors import printable
from polyquant.findings import Finding, Findings, Severity
from polyquant.ops.metrics import ErrorSums
from polyquant.tables import Row

__all__ = ["Measurement", "Status", "Trial"]

Status = Literal["measured", "failed", "skipped"]


@dataclass(frozen=True, slots=True)
class Measurement:
    """The figures of one model, from a separate process."""

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
    divergence: Divergence | None = None
    if (found := entry["divergence"]) is not None:
        divergence = Divergence(
            Mean(**found["log_ratio"]), Mean(**found["kl"]), found["kl_99"], found["kl_max"], Mean(**found["top_1"]),
            found["probability_rms"], (),
        )  # fmt: skip
    scores = {"model": _score(entry["model"]), "reference": _score(entry["reference"])}
    return Evaluation(**{**entry, **scores, "divergence": divergence})


def _score(entry: Mapping[str, Any] | None) -> Any:
    if entry is None:
        return None
    return Score(**{**entry, "nll": Mean(**entry["nll"]), "notes": tuple(entry["notes"])})


@dataclass(frozen=True, slots=True, repr=False)
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

    def __repr__(self) -> str:
        figures = "" if self.kl is None or self.bpw is None else f", {self.bpw:.3f} bits per weight, KL {self.kl:.5f}"
        return f"<Trial {printable(self.name)}: {self.status}{figures}>"

    def row(self, *, efficient: bool) -> Row:
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
            "speed_spread": speed.spread if speed else None,
            "load_seconds": speed.load if speed else None,
            "peak_memory": speed.memory if speed else None,
            "seconds": self.seconds,
            "path": self.path,
            "reason": self.reason,
            "command": self.command,
        }
