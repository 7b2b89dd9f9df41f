"""example.q6: 6.5 bits per weight, in blocks of 32 with one scale.

    byte   0 1      2                                            25
         +------+-------------------------------------------------+
         | d    | eight groups of three bytes with four codes each |
         | f16  | code 4g at bit 0 of group g, then at 6, 12, 18   |
         +------+-------------------------------------------------+

weight = d * (code - 32), little-endian, codes 1 to 63: symmetric, so 0 is not used.
"""

from __future__ import annotations

import numpy as np

from polyquant.codecs.blocks import BlockCodec
from polyquant.types import F32, U8

__all__ = ["Q6"]

_BLOCK, _BYTES, _MOST = 32, 26, 31
_FACTORS = np.linspace(0.8, 1.0, 9, dtype=np.float32)[::-1]
"""Factors for the scale at which the largest weight is exact: clipping it may reduce the total error."""


def decode(blocks: U8) -> F32:
    """uint8 [n, 26] -> float32 [n, 32]."""
    scale = blocks[:, :2].copy().view("<f2").astype(np.float32)
    groups = blocks[:, 2:].reshape(-1, 8, 3).astype(np.uint32)
    word = groups[..., 0] | groups[..., 1] << 8 | groups[..., 2] << 16
    codes = np.stack([word >> shift & 63 for shift in (0, 6, 12, 18)], axis=-1).reshape(-1, _BLOCK)
    return (codes.astype(np.float32) - 32) * scale


def encode(w: F32, importance: F32 | None) -> U8:
    """float32 [n, 32], importance [n, 32] or None -> uint8 [n, 26]; keeps the best of nine scales."""
    weight = np.ones_like(w) if importance is None else importance
    best, least = np.zeros((len(w), _BYTES), np.uint8), np.full(len(w), np.inf, np.float32)
    for factor in _FACTORS:
        tried = _rounded(w, np.abs(w).max(axis=1, keepdims=True) / _MOST * factor)
        error = (weight * np.square(decode(tried) - w)).sum(axis=1)
        better = (error < least) | ((factor == _FACTORS[0]) & ~np.isfinite(error))
        best[better], least[better] = tried[better], error[better]
    return best


def _rounded(w: F32, scale: F32) -> U8:
    """float32 [n, 32], [n, 1] -> uint8 [n, 26]."""
    stored = scale.astype("<f2")
    step = stored.astype(np.float32)
    codes = np.rint(np.divide(w, step, out=np.zeros_like(w), where=step != 0))
    codes = (np.nan_to_num(codes).clip(-_MOST, _MOST) + 32).astype(np.uint32).reshape(-1, 8, 4)
    word = codes[..., 0] | codes[..., 1] << 6 | codes[..., 2] << 12 | codes[..., 3] << 18
    groups = np.stack([word >> shift & 255 for shift in (0, 8, 16)], axis=-1).astype(np.uint8)
    return np.hstack([stored.view(np.uint8), groups.reshape(-1, 24)])


Q6 = BlockCodec("example.q6", -1, _BLOCK, _BYTES, decode, encode, fields=((0, 2, 1),))
