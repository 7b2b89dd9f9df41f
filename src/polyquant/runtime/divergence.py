"""How far one model is from another that reads the same tokens: next-token distributions and the states of every layer.

For each scored token, with p the reference's distribution and q the model's:

    KL(p || q) = sum_v p(v) (log p(v) - log q(v))       nats; what the reference's choice costs when it is coded by the model
    top-1      argmax p = argmax q
    dp         q(t) - p(t) of the token t that follows in the text

For each layer, relative RMS over all tokens fed, sqrt(sum (model - reference)^2 / sum reference^2), of its output state [T, hidden]:

    output     both models as they run: what has piled up so far
    alone      the model's layer on the reference's input: what this layer adds; the residual stream, which it passes through, is counted in
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from polyquant.ops.metrics import ErrorSums, error_sums
from polyquant.runtime.kv_cache import KVCache
from polyquant.runtime.model import Model
from polyquant.runtime.scoring import log_sum_exp, pieces, steps
from polyquant.runtime.windows import Window
from polyquant.types import F32

__all__ = ["Pair", "Scores", "compare_windows"]

F64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Scores:
    """One entry a scored token: log p of the token in both models (nats), KL divergence (nats), whether the first choices agree.

    layers: (output, alone) of every layer; empty if the two have other depths or widths.
    """

    model: F64
    reference: F64
    divergence: F64
    agree: NDArray[np.bool_]
    layers: tuple[tuple[ErrorSums, ErrorSums], ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """The model and the reference."""

    model: Model
    reference: Model

    @property
    def comparable(self) -> bool:
        """True if the layers stand opposite each other."""
        a, b = self.model.decoder.hyper, self.reference.decoder.hyper
        return (a.layers, a.hidden) == (b.layers, b.hidden)

    def caches(self) -> tuple[KVCache, KVCache, KVCache]:
        """Empty: of the model, of the reference, and of the model's layers alone."""
        return self.model.session().cache, self.reference.session().cache, self.model.session().cache


def compare_windows(pair: Pair, windows: Iterable[Window], on_window: Callable[[Window, F64], None]) -> Scores:
    """Scores of all windows; on_window is told each with the model's log p of its tokens."""
    layers = [(ErrorSums(), ErrorSums())] * (pair.model.decoder.hyper.layers if pair.comparable else 0)
    found: list[tuple[F64, F64, F64, NDArray[np.bool_]]] = []
    for window in windows:
        mine, theirs, alone = pair.caches()
        chosen = []
        for fed, skip, targets in steps(window):
            states = _states(pair, fed, (mine, theirs, alone), layers)
            for piece in pieces(len(targets), pair.model.decoder.hyper.vocab):
                chosen.append(_compare(pair, states[0][skip:][piece], states[1][skip:][piece], targets[piece]))
        found += chosen
        on_window(window, np.concatenate([c[0] for c in chosen]))
    model, reference, divergence, agree = (np.concatenate(x) for x in zip(*found, strict=True))
    return Scores(model, reference, divergence, agree, tuple(layers))


def _states(
    pair: Pair,
    fed: NDArray[np.int64],
    caches: tuple[KVCache, KVCache, KVCache],
    layers: list[tuple[ErrorSums, ErrorSums]],
) -> tuple[F32, F32]:
    """Last states [T, hidden] of the model and of the reference; the errors of their layers are added to `layers`."""
    mine, theirs, alone = caches
    model, reference = pair.model.decoder.states(fed, mine), pair.reference.decoder.states(fed, theirs)
    if not pair.comparable:
        return _last(model), _last(reference)
    before = next(reference).copy()
    next(model)
    for i, (output, single) in enumerate(layers):
        after, found = next(reference).copy(), next(model)
        output += error_sums(after, found)
        single += error_sums(after, pair.model.decoder.alone(i, before, alone))
        layers[i] = output, single
        before = after
    alone.length += len(fed)
    return _last(model), _last(reference)


def _last(states: Iterator[F32]) -> F32:
    for x in states:
        last = x
    return last


def _compare(pair: Pair, model: F32, reference: F32, targets: NDArray[np.int64]) -> tuple[F64, F64, F64, NDArray[np.bool_]]:
    """States [n, hidden] of both models and the n tokens that follow -> log p in both, divergence, agreement."""
    q, p = pair.model.decoder.logits(model), pair.reference.decoder.logits(reference)  # [n, vocab]
    rows = np.arange(len(targets))
    agree = q.argmax(-1) == p.argmax(-1)
    log_q, log_p = log_sum_exp(q), log_sum_exp(p)
    chosen = q[rows, targets] - log_q, p[rows, targets] - log_p
    q -= log_q[:, None].astype(np.float32)
    p -= log_p[:, None].astype(np.float32)
    np.subtract(p, q, out=q)
    np.exp(p, out=p)
    return *chosen, np.einsum("nv,nv->n", p, q, dtype=np.float64), agree
