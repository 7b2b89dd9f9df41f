"""Affine-quantized integers, w = (q - z) * s: min-max grids, quantization and dequantization. Native counterparts:
native/codecs/affine.cpp.

symmetric     s = max|w| / 127               z = 0                             q = clamp(round(w / s), -127, 127)
asymmetric    s = (max - min) / 255          z = round(-min / s) - 128         q = clamp(round(w / s + z), -128, 127)

with max and min extended to include 0; for 4 bits 7, 15, 8 instead of 127, 255, 128. Rounds half to even, all in
float32. A zero group has s = 1.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from polyquant.ops import native
from polyquant.ops.metrics import ErrorSums
from polyquant.types import F32, I8, U8

__all__ = ["decode", "encode", "min_max_grid", "quantize_stored", "row_sums"]


def min_max_grid(w: F32, groups: int, bits: int, *, symmetric: bool) -> tuple[F32, F32]:
    """Return scale and offset float32 [rows, groups] of w [rows, K]: the tightest grid without clipping.

    Not finite where w is not.
    """
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
    """Quantize w [rows, K] to codes int8 [rows, K] on the grid scale, offset [rows, G]."""
    (rows, k), groups = w.shape, scale.shape[1]
    codes = np.empty((rows, k), np.int8)
    if (lib := native.lib()) is not None:
        lib.affine_encode(np.ascontiguousarray(w), scale, offset, codes, bits, symmetric)
        return codes
    high = 2 ** (bits - 1) - 1
    with np.errstate(all="ignore"):
        quotient = np.rint(w.reshape(rows, groups, k // groups) / scale[:, :, None] + offset[:, :, None])
        codes[:] = np.clip(np.nan_to_num(quotient), -high if symmetric else -high - 1, high).reshape(rows, k)
    return codes


def decode(codes: I8, scale: F32, offset: F32, out: F32, bias: F32 | None = None) -> F32:
    """Write (codes - offset) * scale [+ bias] into out [rows, K]; scale, offset, bias [rows, G]."""
    (rows, k), groups = codes.shape, scale.shape[1]
    if (lib := native.lib()) is not None:
        lib.affine_decode(codes, scale, offset, out, bias)
        return out
    grouped = codes.reshape(rows, groups, k // groups).astype(np.float32)
    with np.errstate(all="ignore"):
        decoded = (grouped - offset[:, :, None]) * scale[:, :, None]
        out.reshape(grouped.shape)[...] = decoded if bias is None else decoded + bias[:, :, None]
    return out


def row_sums(codes: I8) -> NDArray[np.int64]:
    """Return the sums of the rows of codes [rows, K], int64 [rows]."""
    if (lib := native.lib()) is not None:
        out = np.empty(len(codes), np.int64)
        lib.affine_row_sums(np.ascontiguousarray(codes), out)
        return out
    return np.asarray(codes.sum(1, dtype=np.int64), np.int64)


def quantize_stored(
    source: str, data: U8, shape: tuple[int, int], groups: int, bits: int, *, symmetric: bool, measure: bool
) -> tuple[I8, F32, F32, ErrorSums | None] | None:
    """Quantize stored rows [rows, K] of float codec `source` ("f32", "f16", "bf16") to codes, scale and offset, with
    error sums.

    Bit-identical to min_max_grid, encode, decode and error_sums on the floats, without materializing them. None without
    native kernels, and for rows that hold NaN or infinity.
    """
    lib = native.lib()
    if lib is None:
        return None
    codes = np.empty(shape, np.int8)
    scale, offset = (np.empty((shape[0], groups), np.float32) for _ in range(2))
    flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    sums = lib.affine_quantize(source, flat, codes, scale, offset, bits, symmetric, measure)
    if sums is None:
        return None
    return codes, scale, offset, ErrorSums(codes.size, *sums) if measure else None
