"""Token log-probabilities of an input text, computed without holding the logits of all tokens.

Memory: states of at most _FED tokens [_FED, hidden], logits of at most _LOGITS / vocab tokens at a time (32 MB per
array, a handful at once), and 8 bytes per scored token and metric.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from polyquant.errors import InputError
from polyquant.ops.arithmetic import exp, log
from polyquant.runtime.decoder import Decoder
from polyquant.runtime.kv_cache import KVCache
from polyquant.runtime.windows import Window
from polyquant.types import F32

__all__ = ["log_probs", "log_sum_exp", "pieces", "scored_logits", "steps", "target_log_probs"]

_FED = 512  # tokens per forward pass
_LOGITS = 1 << 23  # elements of a float32 array of logits


def steps(window: Window) -> Iterator[tuple[NDArray[np.int64], int, NDArray[np.int64]]]:
    """Yield (tokens to feed, index of the first state that predicts a scored token, predicted tokens), until all are
    scored.

    The last token is predicted but not fed.
    """
    fed = window.tokens[:-1]
    for a in range(0, len(fed), _FED):
        b = min(a + _FED, len(fed))
        skip = max(0, window.first - 1 - a)
        yield fed[a:b], min(skip, b - a), window.tokens[a + 1 + skip : b + 1]


def pieces(rows: int, vocab: int) -> Iterator[slice]:
    """Return slices of `rows` whose logits fit into memory."""
    step = max(1, _LOGITS // vocab)
    return (slice(a, min(a + step, rows)) for a in range(0, rows, step))


def log_sum_exp(logits: F32) -> NDArray[np.float64]:
    """Return log sum exp over the last axis: [n, vocab] -> [n], summed in float64.

    Raises InputError if a logit is not finite.
    """
    top = logits.max(-1)
    if not np.isfinite(top).all():
        raise InputError(
            "the model's output is not a number", hint="its weights hold NaN or infinity: polyquant validate"
        )
    total = exp(logits - top[:, None]).sum(-1, dtype=np.float64)
    return np.asarray(top + log(total), np.float64)


def log_probs(logits: F32, targets: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return log p in nats of the n tokens that follow, from their logits [n, vocab]. Raises InputError."""
    return np.asarray(logits[np.arange(len(targets)), targets] - log_sum_exp(logits), np.float64)


def scored_logits(decoder: Decoder, cache: KVCache, window: Window) -> Iterator[tuple[F32, NDArray[np.int64]]]:
    """Yield (logits [n, vocab], the n tokens that follow) of the scored tokens of a window, a piece at a time.

    The cache must be empty.
    """
    for fed, skip, targets in steps(window):
        states = decoder.hidden(fed, cache)[skip:]
        for piece in pieces(len(targets), decoder.hyper.vocab):
            yield decoder.logits(states[piece]), targets[piece]


def target_log_probs(decoder: Decoder, cache: KVCache, window: Window) -> NDArray[np.float64]:
    """Return log p of every scored token of a window, [scored], in nats. The cache must be empty."""
    return np.concatenate([log_probs(*scored) for scored in scored_logits(decoder, cache, window)])
