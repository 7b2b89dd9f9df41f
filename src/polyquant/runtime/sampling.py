"""Sample the next token from logits.

The order is: penalties and biases, constraint, top-k, top-p, min-p, temperature, draw. transformers and llama.cpp
agree, except on the temperature, where we follow llama.cpp: the cuts use the model's own probabilities, so a high
temperature admits no additional tokens. Temperature 0 selects the most likely token; among equal ones, the lowest id.

top-k keeps the k most likely tokens; top-p the fewest of those whose probabilities (among the tokens left by top-k)
reach p; min-p those at least min_p times as likely as the most likely one. Each keeps a prefix of the tokens sorted by
logit, so only that prefix is ever sorted.

The frequency and presence penalties are OpenAI's: they subtract from the logits of tokens that this sampler has
chosen, the first in proportion to their count. Biases are added to the logits of single tokens. A constraint (such as
a grammar) excludes tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from polyquant.errors import InputError
from polyquant.types import F32

__all__ = ["Constraint", "Sampler", "Sampling", "log_probabilities", "log_probability"]

_STRIP = 256  # logits per strip, represented by its maximum or sum
_FEW = 256  # tokens that usually contain the nucleus
_BUCKETS, _BUCKETS_A_NAT = 512, 16.0  # of the distance to the largest logit; the last bucket holds the rest


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters.

    temperature 0: greedy. top_k 0, top_p 1, min_p 0, repetition_penalty 1: off. repetition_window: number of recent
    tokens that are penalized. seed None: a random seed. frequency_penalty, presence_penalty: subtracted from the logits
    of chosen tokens, the first once per occurrence. logit_bias: token id -> added to its logit. Raises InputError for
    values out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    repetition_window: int = 64
    seed: int | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, 0.0, math.inf)
        _number("top_p", self.top_p, 0.0, 1.0)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, math.inf, above=True)
        _integer("top_k", self.top_k)
        _integer("repetition_window", self.repetition_window)
        if self.seed is not None:
            _integer("seed", self.seed)
        _number("frequency_penalty", self.frequency_penalty, -math.inf, math.inf)
        _number("presence_penalty", self.presence_penalty, -math.inf, math.inf)
        for token, bias in self.logit_bias.items():
            _integer("a token of logit_bias", token)
            _number("a value of logit_bias", bias, -math.inf, math.inf)


def _number(name: str, value: object, low: float, high: float, *, above: bool = False) -> None:
    good = (
        isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and low <= value <= high
    )
    if not good or (above and value == low):
        span = f" {'above' if above else 'at least'} {low:g}" if math.isinf(high) else f" {low:g} to {high:g}"
        span = " that is finite" if math.isinf(low) else span
        raise InputError(f"{name} is out of range", expected=f"a number{span}", found=value)


def _integer(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InputError(f"{name} is out of range", expected="an integer of at least 0", found=value)


class Constraint(Protocol):
    """Restricts the tokens of one sequence (runtime/grammar.py)."""

    def allowed(self) -> NDArray[np.bool_]:
        """Return whether each token [vocab] may come next; at least one may."""

    def accept(self, token: int) -> None:
        """Advance by the chosen token."""


class Sampler:
    """The random choices of one sequence: the generator's state carries over from token to token."""

    def __init__(self, sampling: Sampling, constraint: Constraint | None = None) -> None:
        self.sampling, self.constraint = sampling, constraint
        self._random = np.random.default_rng(sampling.seed)
        self._counts: dict[int, int] = {}
        self._counting = sampling.frequency_penalty != 0 or sampling.presence_penalty != 0

    def pick(self, logits: F32, history: Sequence[int]) -> int:
        """Choose a token id from logits [vocab]. history: all tokens so far, including the prompt.

        Raises InputError for NaN or infinite logits.
        """
        token = self._pick(self._adjusted(logits, history))
        if self._counting:
            self._counts[token] = self._counts.get(token, 0) + 1
        if self.constraint is not None:
            self.constraint.accept(token)
        return token

    def _adjusted(self, logits: F32, history: Sequence[int]) -> F32:
        """Return the logits after penalties, biases and the constraint."""
        s = self.sampling
        if s.repetition_penalty != 1 and s.repetition_window and history:
            logits = _penalized(logits, history[-s.repetition_window :], s.repetition_penalty)
        if self._counts:
            ids = np.fromiter(self._counts, np.int64)
            counts = np.fromiter(self._counts.values(), np.float32)
            logits = logits.copy()
            logits[ids] -= np.float32(s.frequency_penalty) * counts + np.float32(s.presence_penalty)
        if s.logit_bias:
            logits = logits.copy()
            logits[np.fromiter(s.logit_bias, np.int64)] += np.fromiter(s.logit_bias.values(), np.float32)
        if self.constraint is not None and np.isfinite(logits.max()):
            logits = np.where(self.constraint.allowed(), logits, np.float32(-np.inf))
        return logits

    def _pick(self, logits: F32) -> int:
        s = self.sampling
        best = int(logits.argmax())  # the first NaN, if there is one
        top = float(logits[best])
        if not math.isfinite(top):
            raise InputError(
                "the logits are not finite: the weights hold NaN or infinities, or overflow",
                found=top,
                hint="polyquant validate",
            )
        if s.temperature == 0 or s.top_k == 1 or s.top_p == 0:
            return best
        ids = _cut(logits, top, s)
        candidates = logits if ids is None else logits[ids]
        weights = np.exp((candidates - np.float32(top)) * np.float32(min(1 / s.temperature, 1e30)))
        index = self._draw(weights)
        return index if ids is None else int(ids[index])

    def _draw(self, weights: F32) -> int:
        """Draw index i with probability proportional to weights[i]: first a strip, then an element.

        Never one of weight zero.
        """
        strips = np.add.reduceat(weights, np.arange(0, len(weights), _STRIP))
        running = np.cumsum(strips, dtype=np.float64)
        target = self._random.random() * running[-1]
        strip = min(int(np.searchsorted(running, target, side="right")), int(np.flatnonzero(strips)[-1]))
        inside = weights[strip * _STRIP : (strip + 1) * _STRIP].astype(np.float64)
        share = np.cumsum(inside)
        rest = (target - running[strip] + strips[strip]) / strips[strip] * share[-1]
        last = int(np.flatnonzero(inside)[-1])  # in case rounding leads past the end
        return strip * _STRIP + min(int(np.searchsorted(share, rest, side="right")), last)


def _penalized(logits: F32, recent: Sequence[int], penalty: float) -> F32:
    """Apply the repetition penalty (CTRL, Keskar et al. 2019): divide positive logits, multiply negative ones, once per
    distinct token."""
    ids = np.unique(np.asarray(recent, np.int64))
    out = logits.copy()
    out[ids] = np.where(out[ids] > 0, out[ids] / np.float32(penalty), out[ids] * np.float32(penalty))
    return out


def _cut(logits: F32, top: float, s: Sampling) -> NDArray[np.intp] | None:
    """Return the ids that may be drawn; None for all."""
    ids: NDArray[np.intp] | None = None
    if 0 < s.top_k < len(logits):
        ids = _largest(logits, s.top_k)
    if s.top_p < 1:
        ids = _nucleus(logits, top, s.top_p) if ids is None else ids[: _share(logits[ids], top, s.top_p)]
    if s.min_p > 0:
        least = np.float32(top + math.log(s.min_p))
        ids = np.flatnonzero(logits >= least) if ids is None else ids[logits[ids] >= least]
    return ids


def _largest(logits: F32, k: int) -> NDArray[np.intp]:
    """Return the ids of the k largest logits, largest first, lower ids first among equal ones.

    k strips have a maximum of at least the k-th largest strip maximum t, so at least k logits reach t: few more need to
    be examined.
    """
    strips = len(logits) // _STRIP
    if k >= strips:
        candidates = np.argpartition(-logits, k - 1)[:k] if k < len(logits) else np.arange(len(logits))
        least = logits[candidates].min()
    else:
        maxima = logits[: strips * _STRIP].reshape(strips, _STRIP).max(axis=1)
        least = np.partition(maxima, strips - k)[strips - k]
    candidates = np.flatnonzero(logits >= least)
    return candidates[np.argsort(-logits[candidates], kind="stable")[:k]]


def _nucleus(logits: F32, top: float, p: float) -> NDArray[np.intp]:
    """Return the fewest most likely ids whose probabilities reach p: usually a few hundred, else all of the upper
    buckets and part of one."""
    weights = np.exp(logits - np.float32(top))
    target = p * float(weights.sum())
    ids = _largest(logits, min(_FEW, len(logits)))
    if len(ids) < len(logits) and float(weights[ids].sum()) < target:
        bucket = np.minimum((np.float32(top) - logits) * np.float32(_BUCKETS_A_NAT), _BUCKETS - 1).astype(np.intp)
        running = np.cumsum(np.bincount(bucket, weights, _BUCKETS))
        edge = int(np.searchsorted(running, target))
        above, at = np.flatnonzero(bucket < edge), np.flatnonzero(bucket == edge)
        at = at[np.argsort(-logits[at], kind="stable")]
        target -= running[edge - 1] if edge else 0.0
        return np.concatenate([above, at[: _reach(weights[at], target)]])
    return ids[: _reach(weights[ids], target)]


def _share(logits: F32, top: float, p: float) -> int:
    """Return how many of the sorted logits [n] hold the fraction p of their total probability."""
    weights = np.exp(logits - np.float32(top))
    return _reach(weights, p * float(weights.sum()))


def _reach(weights: F32, target: float) -> int:
    """Return how many of the sorted weights [n] are needed for a sum of `wanted`; at least one."""
    return int(np.searchsorted(np.cumsum(weights, dtype=np.float64), target)) + 1


def log_probability(logits: F32, token: int) -> float:
    """Return the log-probability of a token under the model itself: before penalties, cuts and temperature."""
    top = logits.max()
    return float(logits[token] - top) - math.log(float(np.exp(logits - top).sum()))


def log_probabilities(logits: F32, count: int) -> list[tuple[int, float]]:
    """Return the most likely tokens under the model itself, as (id, log-probability), most likely first."""
    ids = _largest(logits, min(count, len(logits)))
    top = logits.max()
    total = math.log(float(np.exp(logits - top).sum()))
    return [(int(i), float(logits[i] - top) - total) for i in ids]
