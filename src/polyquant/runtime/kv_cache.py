"""Keys and values of the positions seen so far, one pair of arrays a layer; grows with the text, not with the context promised."""

from __future__ import annotations

import numpy as np

from polyquant.ops.decoder import attend
from polyquant.types import F32

__all__ = ["KVCache"]


class KVCache:
    """layers x positions x groups x size. `length`: positions that every layer holds."""

    def __init__(self, layers: int, groups: int, size: int) -> None:
        self.length = 0
        self.keys = [np.empty((0, groups, size), np.float32) for _ in range(layers)]
        self.values = [np.empty((0, groups, size), np.float32) for _ in range(layers)]

    def attend(self, layer: int, q: F32, k: F32, v: F32, *, scale: float, window: int = 0) -> F32:
        """Store k, v [T, G, D] of the T next positions and attend to them and all before. q [T, H, D] -> [T, H, D]."""
        end = self.length + len(k)
        if end > len(self.keys[layer]):
            room = max(64, 2 * self.length, end)
            for arrays in (self.keys, self.values):
                grown = np.empty((room, *arrays[layer].shape[1:]), np.float32)
                grown[: self.length] = arrays[layer][: self.length]
                arrays[layer] = grown
        self.keys[layer][self.length : end] = k
        self.values[layer][self.length : end] = v
        return attend(
            q, self.keys[layer][:end], self.values[layer][:end], start=self.length, scale=scale, window=window
        )

    def truncate(self, length: int) -> None:
        """Forget the positions from `length` on."""
        self.length = min(self.length, length)
