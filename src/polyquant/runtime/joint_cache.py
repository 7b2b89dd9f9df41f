"""Caches for rows that are computed together although each attends on its own: row i of a layer's input is the next
token of sequence i (JointCache), or token i of the next ones of a sequence (StepwiseCache).

The matrices of a layer multiply all rows at once, and only what depends on earlier tokens is computed row by row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from polyquant.ops.decoder import PLAIN, Scores
from polyquant.runtime.kv_cache import KVCache, Passing
from polyquant.runtime.state import Recurrence
from polyquant.types import F32

__all__ = ["JointCache", "StepwiseCache"]


class JointCache:
    """See kv_cache.LayerCache. caches: of different sequences of one decoder."""

    def __init__(self, caches: Sequence[KVCache]) -> None:
        self.caches = tuple(caches)
        self.passing: Passing = {}

    def attend(
        self, layer: int, q: F32, k: F32, v: F32, *, scale: float, window: int = 0, scores: Scores = PLAIN
    ) -> F32:
        """Compute KVCache.attend with row i of q [N, H, D] and k, v [N, G, D] on the cache of sequence i."""
        return np.concatenate(
            [
                cache.attend(layer, q[i : i + 1], k[i : i + 1], v[i : i + 1], scale=scale, window=window, scores=scores)
                for i, cache in enumerate(self.caches)
            ]
        )

    def again(self, layer: int, q: F32, k: F32, v: F32, *, scale: float, window: int = 0) -> F32:
        """Compute KVCache.again with row i on the cache of sequence i."""
        return np.concatenate(
            [
                cache.again(layer, q[i : i + 1], k[i : i + 1], v[i : i + 1], scale=scale, window=window)
                for i, cache in enumerate(self.caches)
            ]
        )

    def scan(self, layer: int, recurrence: Recurrence, *inputs: F32) -> F32:
        """Compute KVCache.scan with row i of the inputs on the states of sequence i."""
        return np.concatenate(
            [cache.scan(layer, recurrence, *(x[i : i + 1] for x in inputs)) for i, cache in enumerate(self.caches)]
        )

    def advance(self, tokens: int) -> None:
        """Count the token of each sequence."""
        for cache in self.caches:
            cache.advance(1)


class StepwiseCache:
    """See kv_cache.LayerCache. cache: of the sequence; each of its next tokens attends as in a single step."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.passing: Passing = {}

    def attend(
        self, layer: int, q: F32, k: F32, v: F32, *, scale: float, window: int = 0, scores: Scores = PLAIN
    ) -> F32:
        """Compute KVCache.attend token by token: q [T, H, D], k and v [T, G, D]."""
        rows = [(i, slice(i, i + 1)) for i in range(len(q))]
        return np.concatenate(
            [
                self.cache.attend(layer, q[r], k[r], v[r], scale=scale, window=window, scores=scores, ahead=i)
                for i, r in rows
            ]
        )

    def again(self, layer: int, q: F32, k: F32, v: F32, *, scale: float, window: int = 0) -> F32:
        """Compute KVCache.again token by token."""
        rows = [(i, slice(i, i + 1)) for i in range(len(q))]
        return np.concatenate(
            [self.cache.again(layer, q[r], k[r], v[r], scale=scale, window=window, ahead=i) for i, r in rows]
        )

    def scan(self, layer: int, recurrence: Recurrence, *inputs: F32) -> F32:
        """Not possible: recurrent states cannot be truncated. Raises ValueError."""
        raise ValueError("recurrent states are computed by single steps")

    def advance(self, tokens: int) -> None:
        """See kv_cache.KVCache."""
        self.cache.advance(tokens)
