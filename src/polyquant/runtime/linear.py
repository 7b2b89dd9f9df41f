"""y = x W^T + b with W as it lies in the file.

A codec that brings a packed kernel is multiplied packed; any other is dequantized some rows at a time, which is correct and slow.
Weights that share an input (q, k, v; gate and up) are one Linear, so that the input is rounded once and the threads meet once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from polyquant.ops.matmul import Rounding, round_activations
from polyquant.types import F32, Floats, Weight

__all__ = ["Linear"]

_CHUNK = 1 << 20  # weights that are dequantized at a time


class Linear:
    """Weights [N_i, K] with one input. bias: float32 [N_i] or None, one for each."""

    def __init__(self, weights: Sequence[Weight], bias: Sequence[F32 | None], rounding: Rounding) -> None:
        self.weights, self.bias, self.rounding = tuple(weights), tuple(bias), rounding

    def __call__(self, x: F32) -> tuple[F32, ...]:
        """x [T, K] -> one [T, N_i] for each weight."""
        return tuple(self._one(w, b, x) for w, b in zip(self.weights, self.bias, strict=True))

    def _one(self, weight: Weight, bias: F32 | None, x: F32) -> F32:
        floats = weight.codec.form is Floats
        x = x if floats else round_activations(x, self.rounding)
        rows, k = weight.shape
        y = np.empty((len(x), rows), np.float32)
        step = max(1, _CHUNK // k) if weight.codec.row_sliced else rows
        for a in range(0, rows, step):
            part = weight.dequantize(rows=slice(a, min(a + step, rows))) if step < rows else weight.dequantize()
            y[:, a : a + step] = x @ part.T
        return y if bias is None else y + bias
