"""Run both models on a few tokens and compare their logits.

    error = median over tokens of |target - source| / |source - mean|

The bound grows with the error of the weights: a layer adds about twice its weights' error, errors of layers add as the
square root of their number. A model with correct tensors and logits beyond it computes something else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from polyquant.analysis.certification.tokens import SAMPLES
from polyquant.analysis.statistics import median
from polyquant.architectures.record import Architecture
from polyquant.errors import PolyquantError
from polyquant.opening import detect, refuse_invalid
from polyquant.types import F32, Checkpoint

if TYPE_CHECKING:
    from polyquant.runtime.model import Model

__all__ = ["LogitCheck", "check_logits"]

_TOKENS, _LARGE_TOKENS = 8, 2
_LARGE = 1 << 28
"""Models of more weights run the fewer tokens, of which the second attends to the first: each costs time."""
_FLOOR = 2e-3
_MOST = 0.95
"""At this error the outputs have little in common."""
_COARSE = 0.5
"""Weights with a larger error (ternary codes of a float model) give logits without a bound."""


@dataclass(frozen=True, slots=True)
class LogitCheck:
    """error, agreement (share of equal most likely tokens) on `tokens` tokens; reason if they were not compared."""

    tokens: int = 0
    error: float | None = None
    bound: float | None = None
    agreement: float | None = None
    reason: str = ""

    @property
    def sound(self) -> bool:
        """True if the error is within the bound, or if there is none."""
        return self.error is None or self.bound is None or self.error <= self.bound


def check_logits(source: Checkpoint, target: Checkpoint, weights: float) -> LogitCheck:
    """Compare logits, or the states of an encoder. weights: largest relative error of a matrix."""
    from polyquant.runtime.load import assemble  # here, for certificates without logits

    models: list[Model] = []
    for side, checkpoint in (("source", source), ("target", target)):
        try:
            refuse_invalid(detect(checkpoint.path)[0], checkpoint.path)
            models.append(assemble(checkpoint, activations="float"))
        except PolyquantError as problem:
            return LogitCheck(reason=f"the {side} does not run: {problem}")
    a, b = models
    if a.vocab != b.vocab:
        return LogitCheck(reason=f"the vocabularies have {a.vocab} and {b.vocab} rows")
    large = sum(math.prod(w.shape) for w in source.values()) > _LARGE
    ids = _ids(a, _LARGE_TOKENS if large else _TOKENS)
    try:
        x, y = _outputs(a, ids), _outputs(b, ids)
    except PolyquantError as problem:
        return LogitCheck(reason=str(problem))
    if x.shape != y.shape:
        return LogitCheck(reason=f"the outputs have shapes {list(x.shape)} and {list(y.shape)}")
    with np.errstate(invalid="ignore"):
        spread = np.linalg.norm(x - x.mean(1, keepdims=True), axis=1)
        errors = np.linalg.norm(y - x, axis=1) / np.maximum(spread, 1e-30)
    error = median(errors)
    layers = a.hyper.layers
    bound: float | None = min(_MOST, _FLOOR + 6 * weights * math.sqrt(2 * layers + 1)) * (
        1 + 2 * _routed(a.architecture)
    )
    if weights > _COARSE:
        bound = None
    agreement = float(np.mean(x.argmax(1) == y.argmax(1)))
    return LogitCheck(len(ids), error if math.isfinite(error) else math.inf, bound, agreement)


def _routed(architecture: Architecture) -> bool:
    """True for experts: an error may change which of them are selected."""
    return architecture.has_experts


def _ids(model: Model, most: int) -> list[int]:
    """At most `most` tokens of a short text; without a usable tokenizer, ids spread over the vocabulary."""
    most = min(most, model.context)
    try:
        ids = list(model.tokenizer.encode(SAMPLES[0]))[:most]
    except (PolyquantError, ImportError):
        ids = []
    if not ids or max(ids) >= model.vocab:
        ids = [(7 + 7919 * i) % model.vocab for i in range(most)]
    return ids


def _outputs(model: Model, ids: list[int]) -> F32:
    """Return logits, or an encoder's states."""
    if model.architecture.encoder:
        return model.states(ids)
    return model.session().feed_all(ids)
