"""The caches of several sequences as one: row i of a layer's input is the next token of sequence i.

The matrices of a layer then multiply all rows at once, and only what depends on earlier tokens is computed sequence by
sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from polyquant.ops.decoder import PLAIN, Scores
from polyquant.runtime.kv_cache import KVCache, Passing
from polyquant.runtime.state import Recurrence
from polyquant.types import F32

__all__ = ["JointCache"]


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
