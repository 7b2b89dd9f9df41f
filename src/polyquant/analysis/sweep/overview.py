"""The trials of a sweep as an Overview, which the page of `polyquant report` shows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from polyquant.analysis.compare import Comparison, TensorComparison
from polyquant.analysis.inspect import Inspection, inspect
from polyquant.analysis.report.gather import Candidate, Overview
from polyquant.analysis.sweep.trials import Trial
from polyquant.analysis.validate import validate
from polyquant.ops.metrics import ErrorSums
from polyquant.registry import codec
from polyquant.types import Weight

__all__ = ["overview"]


def overview(
    reference: Trial,
    trials: Sequence[Trial],
    efficient: frozenset[str],
    *,
    text: str,
    machine: str,
    advice: str,
    warning: str = "",
) -> Overview:
    """The measured candidates with their figures, the others with their reasons. The headers of the source are read
    again. advice: the recommendation; machine: where speeds were measured.
    """
    found, source = reference.measurement, str(reference.path)
    first = Candidate(
        Path(source).absolute().name, inspect(source), validate(source, headers=True),
        evaluation=None if found is None else found.evaluation, speed=reference.speed,
    )  # fmt: skip
    return Overview(
        first,
        tuple(_candidate(source, t) for t in trials if t.status == "measured"),
        efficient,
        text,
        advice=advice,
        machine=machine,
        warning=warning,
        left_out=tuple((t.name, t.status, t.reason) for t in trials if t.status != "measured"),
    )


def _candidate(source: str, trial: Trial) -> Candidate:
    """A trial as a candidate of the report. Its files may not exist any more."""
    found = trial.measurement
    assert found is not None
    score = found.evaluation.model
    codecs = Counter[str]()
    for step in trial.steps:
        codecs[step.target] += math.prod(step.shape)
    inspection = Inspection(
        path=trial.path or f"{trial.name}, not kept: {trial.command}", format=found.format, why="", dialect="",
        architecture=found.architecture, weights=found.weights, nbytes=score.nbytes, codecs=codecs, groups=(),
        tensors=tuple(Weight(s.tensor, s.shape, codec(s.target), {}) for s in trial.steps), notes=score.notes,
    )  # fmt: skip
    tensors = tuple(
        TensorComparison(
            s.tensor, s.shape, s.source, s.target, s.error or ErrorSums(),
            None if s.action in ("quantize", "requantize", "dequantize") else 1.0, s.nbytes,
        )
        for s in trial.steps
    )  # fmt: skip
    return Candidate(
        trial.name, inspection, found.findings, Comparison(source, inspection.path, tensors, (), ()),
        evaluation=found.evaluation, speed=found.speed,
    )  # fmt: skip
