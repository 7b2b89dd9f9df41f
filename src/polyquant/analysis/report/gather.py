"""Collect what the report shows: sizes, errors against the reference, findings, histograms, evaluation.

All figures come from `inspect`, `compare`, `validate` and `evaluate`.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from polyquant.analysis.compare import Comparison, Named, TensorComparison, compare_checkpoints, sides
from polyquant.analysis.efficient import efficient_names
from polyquant.analysis.inspect import Inspection, inspect
from polyquant.analysis.side import Reader, Side
from polyquant.analysis.statistics import BINS, OUTLIER, bar_counts, edge_of, sampled, ternary_counts
from polyquant.errors import PlanError, UnsupportedError, printable
from polyquant.formats.steps import Progress
from polyquant.opening import open_checkpoint
from polyquant.storage.parsed import parsed_once
from polyquant.types import Findings, Shape

if TYPE_CHECKING:
    from polyquant.analysis.evaluate import Evaluation
    from polyquant.analysis.speed import Speed

__all__ = ["BINS", "Candidate", "Histogram", "Overview", "action_of", "diverging", "gather", "layer_and_kind"]

_LAYER = re.compile(r"(?:.*\.)?(?:blk|layers|blocks|h)\.(\d{1,9})\.(.+?)(?:\.weight)?")
_EXPERT = re.compile(r"(?<=\.)\d+(?=\.|$)")

_GENERIC = {"hf", "model", "weights", "out", "output", "latest", "main", "."}
"""Folder names that are shown with their parent folder."""

Tick = Callable[[int, int, str], None]
"""Called with (done, total, what)."""
Seen = Callable[["Candidate"], None]
"""Called with a candidate before it is compared, with histograms that it may have, and with what it has: its findings
follow later.
"""


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts of a tensor's weights in BINS bars between -edge and edge, in the reference and in the candidate.

    outliers: share of the reference's weights beyond six standard deviations; codes: counts of ternary codes -1, 0, 1.
    """

    tensor: str
    edge: float
    reference: tuple[int, ...]
    candidate: tuple[int, ...]
    outliers: float
    codes: tuple[int, ...] | None


@dataclass(frozen=True, slots=True, repr=False)
class Candidate:
    """One checkpoint. comparison, histograms: against the reference, None and () for the reference itself. tensors:
    names, shapes and codecs of those that are compared, under the names of the comparison. speed: on this machine, if
    it was measured.
    """

    label: str
    inspection: Inspection
    findings: Findings
    comparison: Comparison | None = None
    tensors: tuple[tuple[str, Shape, str], ...] = ()
    histograms: tuple[Histogram, ...] = ()
    evaluation: Evaluation | None = None
    problem: str = ""
    speed: Speed | None = None

    def __repr__(self) -> str:
        return f"<Candidate {printable(self.label)}: {len(self.findings)} findings>"

    @property
    def error(self) -> float | None:
        """Relative root mean square error of all weights; None for the reference."""
        return None if self.comparison is None else self.comparison.error.rrmse

    @property
    def divergence(self) -> float | None:
        """Mean KL divergence in nats; None if it was not measured."""
        found = None if self.evaluation is None else self.evaluation.divergence
        return None if found is None else found.kl.value


@dataclass(frozen=True, slots=True, repr=False)
class Overview:
    """The reference and the candidates. efficient: labels of those that no other one beats in both size and error.

    For a sweep, advice: its recommendation; machine: where speeds were measured; warning: about them; left_out: name,
    status and reason of candidates without figures.
    """

    reference: Candidate
    candidates: tuple[Candidate, ...]
    efficient: frozenset[str]
    text: str = ""
    advice: str = ""
    machine: str = ""
    warning: str = ""
    left_out: tuple[tuple[str, str, str], ...] = ()

    def __repr__(self) -> str:
        return f"<Overview {printable(self.reference.label)}: {len(self.candidates)} compared>"


@parsed_once()
def gather(
    reference: str | os.PathLike[str],
    others: Sequence[str | os.PathLike[str]],
    *,
    text: str | os.PathLike[str] | None = None,
    tokens: int | None = None,
    histograms: int = 4,
    tick: Tick = lambda done, total, what: None,
    seen: Seen = lambda candidate: None,
) -> Overview:
    """Compare each of `others` with the reference. text: evaluate all on it, with at most `tokens` tokens; histograms:
    number of tensors of each candidate, the worst first; seen: called with candidates early, to draw them meanwhile.
    Raises InputError, PlanError, UnsupportedError.
    """
    if text is not None:
        from polyquant.analysis.evaluate import evaluate
    labels = _labels([reference, *others])
    checkpoint = open_checkpoint(reference)
    alone = evaluate(reference, text=text, tokens=tokens) if text is not None and not others else None
    candidates = []
    stages = 1 if text is None else 2

    def watching(stage: int, label: str) -> Callable[[Progress], None]:
        def watch(progress: Progress) -> None:
            share = progress.done / max(1, progress.total)
            tick(int(1000 * (stage + share)), 1000 * stages * len(others), label)

        return watch

    with ThreadPoolExecutor(1) as aside:

        def checking(path: str | os.PathLike[str]) -> Future[Findings]:
            return aside.submit(copy_context().run, _findings, path)

        first_findings = checking(reference)
        for i, (label, path) in enumerate(zip(labels[1:], others, strict=True)):
            other = open_checkpoint(path)
            findings = checking(path)
            named = sides(checkpoint, other)
            candidate = Candidate(label, inspect(path), Findings(), tensors=_compared(named))
            seen(candidate)
            worst = _Worst(candidate, named, histograms, seen)
            comparison = compare_checkpoints(
                checkpoint, other, named=named, on_progress=watching(stages * i, label), on_tensor=worst.add
            )
            candidate = replace(candidate, comparison=comparison)
            seen(candidate)
            candidate = replace(candidate, histograms=worst.histograms())
            seen(candidate)
            evaluation, problem = None, ""
            if text is not None:
                try:
                    evaluation = evaluate(
                        path, text=text, against=reference, tokens=tokens, on_progress=watching(stages * i + 1, label)
                    )
                except (UnsupportedError, PlanError) as refused:
                    problem = str(refused)
            candidates.append(replace(candidate, findings=findings.result(), evaluation=evaluation, problem=problem))
        first = Candidate(labels[0], inspect(reference), first_findings.result(), evaluation=alone)
    return Overview(first, tuple(candidates), _efficient(candidates), "" if text is None else os.fspath(text))


def _findings(path: str | os.PathLike[str]) -> Findings:
    from polyquant.analysis.validate import validate

    return validate(path, headers=True)


def _compared(named: Named) -> tuple[tuple[str, Shape, str], ...]:
    """Names, shapes and codecs, on the second side, of the tensors that both have."""
    left, right = named
    return tuple((name, right[name].shape, right[name].codec) for name in left if name in right)


def _labels(paths: Sequence[str | os.PathLike[str]]) -> list[str]:
    """Short distinct names: the last component, with its parents where two are equal."""
    parts = [Path(os.fspath(p)).parts or ("?",) for p in paths]
    for n in range(1, max(map(len, parts)) + 2):
        labels = ["/".join(p[-n - (p[-1].lower() in _GENERIC) :]).lstrip("/") or "/" for p in parts]
        if len(set(labels)) == len(labels):
            return labels
    raise PlanError("the same path is given twice", found=", ".join(dict.fromkeys(str(os.fspath(p)) for p in paths)))


def diverging(candidates: Sequence[Candidate]) -> bool:
    """True if the divergence of all candidates is known; it then takes the place of the error of the weights."""
    return all(c.divergence is not None for c in candidates)


def _efficient(candidates: Sequence[Candidate]) -> frozenset[str]:
    """Those for which no other one is smaller and better: by divergence if all have one, else by the error."""
    known = diverging(candidates)
    return efficient_names(
        {c.label: (c.inspection.nbytes, (c.divergence if known else c.error) or 0.0) for c in candidates}
    )


def action_of(t: TensorComparison) -> str:
    """Return the action: "copied", "transcoded" (other bytes, same values or codes) or "quantized"."""
    exact = t.error.snr == math.inf
    if exact and t.a == t.b:
        return "copied"
    return "transcoded" if exact or t.equal_codes == 1.0 else "quantized"


def layer_and_kind(name: str) -> tuple[int, str] | None:
    """The layer, and the name inside it without `.weight` and the number of an expert; None outside the layers."""
    match = _LAYER.fullmatch(name)
    return (int(match[1]), _EXPERT.sub("*", match[2])) if match else None


# ---------------------------------------------------------------- histograms


class _Worst:
    """The `most` matrices with the largest errors, and their histograms.

    `seen` is called with the worst so far once most weights are compared: few others follow, and the charts are drawn
    while the rest is compared.
    """

    EARLY = 0.7
    """Share of the weights after which histograms are made."""

    def __init__(self, candidate: Candidate, named: Named, most: int, seen: Seen) -> None:
        self._candidate, self._named, self._most, self._seen = candidate, named, most, seen
        self._todo = sum(math.prod(shape) for _, shape, _ in candidate.tensors)
        self._late = (1 - self.EARLY) * self._todo
        self._worst: list[TensorComparison] = []
        self._made: dict[str, Histogram] = {}

    def add(self, compared: TensorComparison) -> None:
        """Take the next result."""
        self._todo -= math.prod(compared.shape)
        if len(compared.shape) > 1 and compared.error.snr < math.inf:
            self._worst = sorted([*self._worst, compared], key=lambda t: t.error.snr)[: self._most]
        if self._todo < self._late and any(t.name not in self._made for t in self._worst):
            self._seen(replace(self._candidate, histograms=self.histograms()))

    def histograms(self) -> tuple[Histogram, ...]:
        """Those of the worst matrices so far, the worst first."""
        left, right = self._named
        for t in self._worst:
            if t.name not in self._made:
                self._made[t.name] = _histogram(t.name, left[t.name], right[t.name])
        return tuple(self._made[t.name] for t in self._worst)


def _histogram(name: str, a: Side, b: Side) -> Histogram:
    x, y = (sampled(Reader(side), a.shape) for side in (a, b))
    deviation = float(x.std()) or 1.0
    edge = edge_of(x, deviation)
    outliers = float((np.abs(x) > OUTLIER * deviation).mean())
    return Histogram(name, edge, bar_counts(x, edge), bar_counts(y, edge), outliers, ternary_counts(b))
