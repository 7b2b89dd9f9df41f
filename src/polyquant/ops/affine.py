"""Whole numbers on evenly spaced levels, w = (q - z) * s: min-max grids, rounding to them, and back. The numpy references; twins in native/affine.cpp.

symmetric     s = max|w| / 127               z = 0                             q = clamp(round(w / s), -127, 127)
asymmetric    s = (max - min) / 255          z = round(-min / s) - 128         q = clamp(round(w / s + z), -128, 127)

with max and min widened to include 0; for 4 bits 7, 15, 8 in place of 127, 255, 128. Rounds half to even, all in float32. A group of zeros has s = 1.
"""

from __future__ import annotations

import numpy as np

from polyquant.ops import native
from polyquant.types import F32, I8

__all__ = ["decode", "encode", "min_max_grid"]


def min_max_grid(w: F32, groups: int, bits: int, *, symmetric: bool) -> tuple[F32, F32]:
    """Scale and offset float32 [rows, groups] of w [rows, K]: the tightest grid that cuts nothing off. Not finite where w is not."""
    rows, k = w.shape
    scale, offset = np.empty((rows, groups), np.float32), np.zeros((rows, groups), np.float32)
    if (lib := native.lib()) is not None:
        lib.affine_grid(np.ascontiguousarray(w), scale, offset, bits, symmetric)
        return scale, offset
    grouped = w.reshape(rows, groups, k // groups)
    with np.errstate(all="ignore"):
        if symmetric:
            top = np.abs(grouped).max(2, initial=0)
            np.divide(top, np.float32(2 ** (bits - 1) - 1), out=scale)
            scale[top == 0] = 1
        else:
            high, low = grouped.max(2, initial=0), grouped.min(2, initial=0)
            np.divide(high - low, np.float32(2**bits - 1), out=scale)
            scale[high == low] = 1
            offset[:] = np.rint(-low / scale) - np.float32(2 ** (bits - 1))
    return scale, offset


def encode(w: F32, scale: F32, offset: F32, bits: int, *, symmetric: bool) -> I8:
    """w [rows, K] -> codes int8 [rows, K] on the grid scale, offset [rows, G]."""
    rows, k = w.shape
    codes = np.empty((rows, k), np.int8)
    if (lib := native.lib()) is not None:
        lib.affine_encode(np.ascontiguousarray(w), scale, offset, codes, bits, symmetric)
        return codes
    high = 2 ** (bits - 1) - 1
    with np.errstate(all="ignore"):
        found = np.rint(w.reshape(rows, scale.shape[1], -1) / scale[:, :, None] + offset[:, :, None])
        codes[:] = np.clip(np.nan_to_num(found), -high if symmetric else -high - 1, high).reshape(rows, k)
    return codes


def decode(codes: I8, scale: F32, offset: F32, out: F32) -> F32:
    """(codes - offset) * scale into out [rows, K]; scale, offset [rows, G]."""
    if (lib := native.lib()) is not None:
        lib.affine_decode(codes, scale, offset, out)
        return out
    rows = len(codes)
    grouped = codes.reshape(rows, scale.shape[1], -1).astype(np.float32)
    with np.errstate(all="ignore"):
        out.reshape(grouped.shape)[...] = (grouped - offset[:, :, None]) * scale[:, :, None]
    return out
