"""The trials of a sweep as an Overview, which the page of `polyquant report` shows."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

from polyquant.analysis.compare import Comparison, TensorComparison
from polyquant.analysis.inspect import Inspection, inspect
from polyquant.analysis.report.gather import Candidate, Overview
from polyquant.analysis.sweep.results import Sweep
from polyquant.analysis.sweep.trials import Trial
from polyquant.analysis.validate import validate
from polyquant.ops.metrics import ErrorSums
from polyquant.registry import codec
from polyquant.types import Weight

__all__ = ["overview"]


def overview(result: Sweep) -> Overview:
    """The measured candidates with their figures, the others with their reasons. The source is read again: headers."""
    found = result.reference.measurement
    reference = Candidate(
        Path(result.source).absolute().name, inspect(result.source), validate(result.source, headers=True),
        evaluation=None if found is None else found.evaluation, speed=result.reference.speed,
    )  # fmt: skip
    measured = [t for t in result.trials if t.status == "measured"]
    return Overview(
        reference,
        tuple(_candidate(result, t) for t in measured),
        result.efficient,
        result.text,
        scope="the tensors that were quantized",
        advice=result.advice.sentence,
        machine=result.machine,
        left_out=tuple((t.name, t.status, t.reason) for t in result.trials if t.status != "measured"),
    )


def _candidate(result: Sweep, trial: Trial) -> Candidate:
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
        trial.name, inspection, found.findings, Comparison(result.source, inspection.path, tensors, (), ()),
        evaluation=found.evaluation, speed=found.speed,
    )  # fmt: skip
