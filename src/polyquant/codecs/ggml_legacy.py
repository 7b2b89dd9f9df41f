"""ggml's first types: blocks of 32 weights with one fp16 scale, some with a minimum.

    Q8_0   34 bytes  8.5 bpw   [d f16][q i8 x 32]                     w = q * d
    (byte 0 at the left)

d is amax / 127, rounded to fp16 only when stored; codes use the unrounded 1/d (ggml-quants.c, quantize_row_q8_0_ref), rounded
half away from zero. Source: ggml-quants.c of llama.cpp 0c1e570.
"""

from __future__ import annotations

import numpy as np

from polyquant.codecs.blocks import BlockCodec
from polyquant.types import F32, U8


def _f16(x: U8) -> F32:
    """fp16 field uint8 [n, 2] -> float32 [n, 1]."""
    return x.copy().view(np.float16).astype(np.float32)


def _half_away(x: F32) -> F32:
    """Round half away from zero, as C's roundf does."""
    whole = np.trunc(x)
    return whole + np.where(np.abs(x - whole) >= 0.5, np.copysign(np.float32(1), x), np.float32(0))


def decode_q8_0(b: U8) -> F32:
    """[n, 34] -> [n, 32]"""
    return b[:, 2:].view(np.int8).astype(np.float32) * _f16(b[:, :2])


def encode_q8_0(w: F32, importance: F32 | None) -> U8:
    """[n, 32] -> [n, 34]; importance changes nothing: there is nothing to search."""
    d = np.abs(w).max(axis=1, keepdims=True) / np.float32(127)  # [n, 1]
    with np.errstate(divide="ignore"):
        inverse = np.where(d > 0, np.float32(1) / d, np.float32(0))
    q = _half_away(w * inverse).astype(np.int8)
    return np.concatenate([d.astype(np.float16).view(np.uint8), q.view(np.uint8)], axis=1)


Q8_0 = BlockCodec("q8_0", 8, 32, 34, decode_q8_0, encode_q8_0, fields=((0, 2, 1),))
