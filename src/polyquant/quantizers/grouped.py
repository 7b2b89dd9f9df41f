"""Quantization of floats to affine codes in groups: the grid of each group, rounded to the nearest code.

    none       s = max|w| / (2^(b - 1) - 0.5), codes from -2^(b - 1)            symmetric
    integer    s = (max - min) / (2^b - 1), z = round(-min / s)                 a zero point
    bias       s = (max - min) / (2^b - 1), bias = min                          a float

Scales and biases are rounded to the dtype in which they are stored before the codes are chosen.
"""

from __future__ import annotations

import numpy as np

from polyquant.codecs.affine_codec import FLOAT_TYPES
from polyquant.codecs.keeping import Integers
from polyquant.types import F32, Affine

__all__ = ["quantize"]


def quantize(traits: Integers, w: F32, importance: F32 | None = None) -> Affine:
    """Quantize w [N, K] for a codec with these traits; K is a multiple of the group. importance [K] is not used."""
    del importance
    n, k = w.shape
    groups = k // traits.group if traits.group else 1
    cells = w.reshape(1, 1, n * k) if traits.tensor else w.reshape(n, groups, k // groups)
    half = 2 ** (traits.bits - 1)
    high, low = (f(cells, axis=2, initial=0) for f in (np.max, np.min))
    if traits.zero == "none":
        scale = np.maximum(high, -low) / np.float32(half - 0.5)
    else:
        scale = (high - low) / np.float32(2 * half - 1)
    scale = _rounded(np.where(scale == 0, 1, scale).astype(np.float32), traits.scale)
    if traits.zero == "bias":
        bias = _rounded(low.astype(np.float32), traits.scale)
        levels = np.clip(np.rint((cells - bias[:, :, None]) / scale[:, :, None]), 0, 2 * half - 1)
        codes = (levels - half).astype(np.int8).reshape(n, k)
        return Affine(traits.bits, codes, scale, np.full_like(scale, -half), bias=bias)
    offset = np.zeros_like(scale) if traits.zero == "none" else np.clip(np.rint(-low / scale), 0, 2 * half - 1) - half
    offset = offset.astype(np.float32)
    codes = np.clip(np.rint(cells / scale[:, :, None] + offset[:, :, None]), -half, half - 1).astype(np.int8)
    if traits.tensor:
        scale, offset = np.repeat(scale.reshape(1, 1), n, 0), np.repeat(offset.reshape(1, 1), n, 0)
    return Affine(traits.bits, codes.reshape(n, k), scale, offset)


def _rounded(values: F32, dtype: str) -> F32:
    """Values as stored in `dtype`, kept away from 0 and infinity."""
    kind = FLOAT_TYPES[dtype]
    with np.errstate(over="ignore"):
        out = values.astype(kind).astype(np.float32)
    return out
