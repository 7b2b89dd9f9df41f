"""Smoothing scales: move activation outliers from the inputs of linear layers into their weights, per channel.

    s = max|x| ^ a / max|w| ^ (1 - a), at least 1e-5      x / s, and columns of W times s: the product is unchanged
    shift = (max x + min x) / 2                           x - shift, and W @ shift is added to the bias; max|x| is then
                                                          that of x - shift

a = 0.5 in SmoothQuant (m1, shift), 0.9 in iterative smoothing (m4). Query heads that share a value head share its mean
s. Source: Xiao et al. 2023 (arXiv 2211.10438); shifts from Wei et al. 2023 (arXiv 2304.09145); the constants are
msModelSlim's.
"""

from __future__ import annotations

import numpy as np

from polyquant.ops import exact
from polyquant.types import F32

__all__ = ["ALPHA", "LEAST", "power_of_two", "shared_by_heads", "smoothing_scale"]

ALPHA = {"m1": 0.5, "m4": 0.9, "shift": 0.5}
LEAST = np.float32(1e-5)


def smoothing_scale(inputs: F32, weights: F32, alpha: float) -> F32:
    """Return s [K] > 0. inputs: max|x| [K]; weights: max|w| [K] over the columns of all weights that read them."""
    wide, over = inputs.astype(np.float64), np.maximum(weights, LEAST).astype(np.float64)
    scale = exact.power(wide, alpha) / exact.power(over, 1 - alpha)
    return np.maximum(scale, LEAST).astype(np.float32)


def power_of_two(scale: F32) -> F32:
    """Round a scale [K] to powers of two, by ratio: at most a factor of sqrt(2) away."""
    mantissa, exponent = np.frexp(scale)  # in [0.5, 1)
    nearest = exponent - (mantissa < np.float32(0.5**0.5))
    return np.asarray(np.ldexp(np.float32(1), nearest), np.float32)


def shared_by_heads(scale: F32, kv_heads: int, size: int) -> tuple[F32, F32]:
    """Average the scale of o's inputs [H * size] over heads that share values.

    Returns (per head [H * size], per value head [kv_heads * size]).
    """
    grouped = scale.reshape(kv_heads, -1, size)  # [kv_heads, heads of each, size]
    mean = grouped.mean(1, dtype=np.float32)
    return np.repeat(mean, grouped.shape[1], 0).reshape(-1), mean.reshape(-1)
