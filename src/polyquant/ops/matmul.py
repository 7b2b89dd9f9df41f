"""Products of packed weights and activations: numpy references and their native kernels.

int8 activations: each block of 32 values has its own scale d, q = round(x / d) half to even, x is about d * q. The
scale max|x| / t, t = 127 ... 120, with the least squared error is used (the first among equals). Ternary
weights use blocks of 128, which lets their kernels add in 16 bits. BitNet rounds a whole token with one scale,
max(max|x|, 1e-5) / 127, as in training. With 8-bit floats, activations are rounded to bfloat16 instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from polyquant.ops import native
from polyquant.ops.trellis import TILE_ORDERS
from polyquant.types import F32, U8, Rounding

__all__ = ["BLOCK", "ROUNDING_CODES", "Group", "packed", "round_activations", "round_to_bfloat16", "trellis"]

BLOCK = 32
_STEPS = tuple(np.float32(t) for t in range(127, 119, -1))
ROUNDING_CODES: dict[Rounding, int] = {"none": 0, "block": 1, "token": 2, "wide": 3}


def packed(name: str, blocks: U8, rows: int, cols: int, *, scale: float = 1.0, lane_step: int = 0) -> Any | None:
    """Return a handle on packed bytes for `Group`, which keeps them alive; None if there is no native kernel of that
    name.

    blocks: uint8, at least the payload of [rows, cols]. scale: of the whole matrix, in addition to stored scales.
    lane_step: 0 if each line of bytes holds one row; otherwise four rows share a line, lane_step apart (1, or rows /
    4).
    """
    if not native.available() or rows == 0 or cols == 0:
        return None
    lib = native.module()
    if not lib.has_packed(name):
        return None
    return lib.packed(name, np.ascontiguousarray(blocks).reshape(-1), rows, cols, scale, lane_step)


def trellis(
    tiles: U8,
    table: F32,
    levels: tuple[NDArray[np.int16], float, float],
    *,
    shape: tuple[int, int],
    bits: int,
    window_bits: int,
    book: str,
    tile_order: str,
    blocks: tuple[int, int],
    halves: bool,
    scales: F32,
    su: F32,
    sv: F32,
) -> Any | None:
    """Return a handle on a trellis-coded matrix [N, K] (codecs/trellis.py) for `Group`, which keeps the arrays alive;
    None without native kernels.

    table: the exact values, float32 [2 ** window_bits]; levels: integers about (value - zero) / step; halves: weights
    in half precision.
    """
    if not native.available():
        return None
    integers, step, zero = levels
    order = None if tile_order == "row_major" else TILE_ORDERS[tile_order].astype(np.uint8)
    return native.module().trellis(
        np.ascontiguousarray(tiles).reshape(-1), shape[1], shape[0], bits, window_bits, book,
        np.append(integers, np.int16(0)), table, step, zero, order, blocks,
        *map(np.ascontiguousarray, (scales, su, sv)), halves,
    )  # fmt: skip


class Group:
    """Handles of matrices [N_i, K] of one kind, with a common input."""

    def __init__(self, handles: Sequence[Any], sizes: Sequence[int]) -> None:
        lib = native.module()
        kinds = {lib.Trellis: lib.TrellisGroup, lib.Affine: lib.AffineGroup}
        group = kinds.get(type(handles[0]), lib.PackedGroup)
        self._multiply = group(list(handles)).multiply
        ends = np.cumsum(sizes).tolist()
        self._rows = ends[-1]
        self._slices = [slice(end - n, end) for n, end in zip(sizes, ends, strict=True)]

    def __call__(self, x: F32, rounding: Rounding) -> list[F32]:
        """Multiply x [T, K], C-contiguous -> one [T, N_i] per matrix, as columns of one array."""
        y = native.empty(len(x), self._rows)
        self._multiply(x, ROUNDING_CODES[rounding], y)
        return [y[:, part] for part in self._slices] if len(self._slices) > 1 else [y]


def round_activations(x: F32, rounding: Rounding) -> F32:
    """Round activations [T, K] to int8 and back to float32, as the packed kernels do."""
    if rounding == "none":
        return x
    if rounding == "token":
        with np.errstate(all="ignore"):
            step = np.maximum(np.abs(x).max(-1, keepdims=True, initial=0), np.float32(1e-5)) / np.float32(127)
            return np.asarray(np.where(np.isfinite(step), np.rint(x / step) * step, np.nan), np.float32)
    tokens, k = x.shape
    block = 4 * BLOCK if rounding == "wide" else BLOCK
    padded = np.zeros((tokens, -(-k // block), block), np.float32)
    padded.reshape(tokens, -1)[:, :k] = x
    best, least = padded, np.full((*padded.shape[:2], 1), np.inf, np.float32)
    top = np.abs(padded).max(-1, keepdims=True)
    with np.errstate(all="ignore"):  # NaN and infinity make the whole block NaN, as in the kernels
        for steps in _STEPS:
            scaled = padded * np.where(top > 1e-30, steps / top, 0)
            rounded, step = np.rint(scaled), top / steps
            error = _sum(np.square(rounded - scaled)) * (step * step)
            best, least = np.where(error < least, rounded * step, best), np.minimum(error, least)
        best = np.where(np.isfinite(top), best, np.nan)
    return np.asarray(best.reshape(tokens, -1)[:, :k], np.float32)


def round_to_bfloat16(x: F32, rounding: Rounding) -> F32:
    """Round activations to bfloat16, half to even, as the kernels of 8-bit floats do unless `rounding` is "none"."""
    return x if rounding == "none" else x.astype(ml_dtypes.bfloat16).astype(np.float32)


def _sum(x: F32) -> F32:
    """Sum over the last axis in the order of the kernels, so that both select the same scale: [..., 8 n] -> [...,
    1]."""
    lanes = np.zeros((*x.shape[:-1], 8), np.float32)
    for i in range(0, x.shape[-1], 8):
        lanes = lanes + x[..., i : i + 8]
    for width in (4, 2, 1):
        lanes = lanes[..., :width] + lanes[..., width : 2 * width]
    return lanes
