"""Divergence of a model from a reference on the same tokens: next-token distributions and the states of every layer.

For each scored token, with p the reference's distribution and q the model's:

    KL(p || q) = sum_v p(v) (log p(v) - log q(v))       in nats
    top-1      argmax p = argmax q
    dp         q(t) - p(t) of the actual next token t

For the embedding and each layer the relative RMS error over all tokens, sqrt(sum (model - reference)^2 / sum
reference^2), of the output state [T, hidden], and for the head that of the logits of the scored tokens:

    output     both models as they run: the accumulated error
    alone      the model's layer on the reference's input: the error of this layer. The state includes the layer's input
               (the residual stream), so a layer with a small contribution has a small error
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from polyquant.errors import InputError
from polyquant.ops.metrics import ErrorSums, error_sums
from polyquant.runtime.kv_cache import KVCache
from polyquant.runtime.model import Model
from polyquant.runtime.scoring import log_sum_exp, pieces, scored_logits, steps
from polyquant.runtime.windows import Window
from polyquant.types import F32

__all__ = ["Pair", "Scores", "compare_windows", "compare_with_logits"]

F64: TypeAlias = NDArray[np.float64]
Errors: TypeAlias = tuple[ErrorSums, ErrorSums]
Piece: TypeAlias = tuple[F64, F64, F64, NDArray[np.bool_]]
"""The first four entries of `Scores`, for some tokens."""


@dataclass(frozen=True, slots=True)
class Scores:
    """One entry per scored token: log p in both models (nats), KL divergence (nats), whether the top-1 tokens agree.

    layers: (output, alone) of the embedding, every layer, and the head; empty if depths or widths differ.
    """

    model: F64
    reference: F64
    divergence: F64
    agree: NDArray[np.bool_]
    layers: tuple[Errors, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """The model and the reference."""

    model: Model
    reference: Model

    @property
    def comparable(self) -> bool:
        """True if both have the same number and width of layers."""
        a, b = self.model.decoder.hyper, self.reference.decoder.hyper
        return (a.layers, a.hidden) == (b.layers, b.hidden)

    def caches(self) -> tuple[KVCache, KVCache, KVCache]:
        """Empty caches of the model, of the reference, and for the model's layers alone."""
        return self.model.session().cache, self.reference.session().cache, self.model.session().cache


def compare_windows(pair: Pair, windows: Iterable[Window], on_window: Callable[[Window, F64], None]) -> Scores:
    """Score all windows. on_window is called with each window and the model's log p of its tokens."""
    layers = [(ErrorSums(), ErrorSums())] * (pair.model.decoder.hyper.layers + 2 if pair.comparable else 0)
    scores: list[Piece] = []
    for window in windows:
        mine, theirs, alone = pair.caches()
        chosen = []
        for fed, skip, targets in steps(window):
            model, reference = _states(pair, fed, (mine, theirs, alone), layers)
            chosen += [
                _compare(pair, model[skip:][piece], reference[skip:][piece], targets[piece], layers)
                for piece in pieces(len(targets), pair.model.decoder.hyper.vocab)
            ]
        scores += chosen
        on_window(window, np.concatenate([c[0] for c in chosen]))
    return _joined(scores, layers)


def compare_with_logits(
    model: Model, windows: Sequence[Window], logits_of: Callable[[int], F32], on_window: Callable[[int], None]
) -> Scores:
    """Score all windows against the reference's logits; the states of layers are not compared.

    logits_of: returns the logits of the scored tokens of window i [scored, vocab], which are overwritten; on_window is
    called with i after each. Raises InputError without a scored token.
    """
    scores: list[Piece] = []
    for i, window in enumerate(windows):
        reference, at = logits_of(i), 0
        for logits, targets in scored_logits(model.decoder, model.session().cache, window):
            scores.append(_compare_logits(logits, reference[at : at + len(logits)], targets))
            at += len(logits)
        on_window(i)
    return _joined(scores, [])


def _joined(scores: Sequence[Piece], layers: Sequence[Errors]) -> Scores:
    """The scores of all tokens."""
    if not scores:
        raise InputError("no token of the text is scored")
    model, reference, divergence, agree = (np.concatenate(x) for x in zip(*scores, strict=True))
    return Scores(model, reference, divergence, agree, tuple(layers))


def _states(
    pair: Pair, fed: NDArray[np.int64], caches: tuple[KVCache, KVCache, KVCache], layers: list[Errors]
) -> tuple[F32, F32]:
    """The last states [T, hidden] of model and reference; adds the errors of embedding and layers to `layers`."""
    mine, theirs, alone = caches
    model, reference = pair.model.decoder.states(fed, mine), pair.reference.decoder.states(fed, theirs)
    if not pair.comparable:
        return _last(model), _last(reference)
    before = next(reference).copy()
    _add(layers, 0, before, next(model))
    for i in range(pair.model.decoder.hyper.layers):
        after = next(reference).copy()
        _add(layers, i + 1, after, next(model), pair.model.decoder.run_layer(i, before, alone))
        before = after
    alone.length += len(fed)
    return _last(model), _last(reference)


def _add(layers: list[Errors], i: int, truth: F32, output: F32, alone: F32 | None = None) -> None:
    """Add the errors of entry i. alone: None if equal to the output."""
    sums = error_sums(truth, output)
    layers[i] = layers[i][0] + sums, layers[i][1] + (sums if alone is None else error_sums(truth, alone))


def _last(states: Iterator[F32]) -> F32:
    for x in states:
        last = x
    return last


def _compare(pair: Pair, model: F32, reference: F32, targets: NDArray[np.int64], layers: list[Errors]) -> Piece:
    """States [n, hidden] of both models and the n tokens that follow -> log p in both, divergence, agreement."""
    q, p = pair.model.decoder.logits(model), pair.reference.decoder.logits(reference)  # [n, vocab]
    if layers:
        _add(layers, -1, p, q, pair.model.decoder.logits(reference))
    return _compare_logits(q, p, targets)


def _compare_logits(q: F32, p: F32, targets: NDArray[np.int64]) -> Piece:
    """Logits [n, vocab] of model and reference, both overwritten, and the n tokens that follow -> log p of those in
    both, divergence, agreement.
    """
    rows = np.arange(len(targets))
    agree = q.argmax(-1) == p.argmax(-1)
    log_q, log_p = log_sum_exp(q), log_sum_exp(p)
    chosen = q[rows, targets] - log_q, p[rows, targets] - log_p
    p -= log_p[:, None].astype(np.float32)
    q -= log_q[:, None].astype(np.float32)
    np.subtract(p, q, out=q)
    np.exp(p, out=p)
    divergence = np.einsum("nv,nv->n", p, q, dtype=np.float64)
    return *chosen, np.maximum(divergence, 0), agree  # rounding can give -1e-8 for equal distributions
