"""Round to small floats with block scales: the libraries' scale, or a neighbour with a smaller squared error.

    e8m0     2^(floor(log2 amax) - e), the rule of the OCP specification (e: exponent of the element's largest value),
             and twice that, ModelOpt's rule where the first clips
    e4m3     amax / largest / tensor scale to nearest, its neighbours, and the one for amax at the next lower element
             (e2m1: 4), which suits groups with several large values; tensor scale = amax / (largest * 448)
    floats   amax / largest in the dtype of the scales, and the next larger value, which clips nothing

Codes are the nearest ones, ties to even, as in all libraries; so no choice is worse than theirs. Sources:
compressed-tensors' calculate_qparams, ModelOpt's nvfp4_tensor and mxfp4_tensor (facts).
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from polyquant.codecs.keeping import SmallFloats
from polyquant.ops import small_floats
from polyquant.types import F32, ScaledFloats

__all__ = ["quantize"]

_MOST_E4M3 = np.float32(448)
_LARGEST = {"f16": np.float32(65504), "bf16": np.float32(3.3895314e38)}
_FLOATS = {"f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16), "f32": np.dtype(np.float32)}


def quantize(want: SmallFloats, w: F32, importance: F32 | None = None, peak: float | None = None) -> ScaledFloats:
    """Quantize w [N, K]; importance [K] weights the columns. peak: the largest magnitude of the whole weight, of which
    w is a part; by default that of w. Rows of w begin with a block of rows.
    """
    k = w.shape[1]
    high, wide = want.block
    if not w.size:
        return _empty(want, w)
    group = wide or max(1, k)
    top = small_floats.amax(w, group)
    peak = float(top.max(initial=0)) if peak is None else peak
    tensor = None
    if want.tensor:
        tensor = _tensor_scale(want, peak)
    if high != 1:
        top = np.full((1, top.shape[1]), peak, np.float32) if high == 0 else _by_blocks(top, high)
    scales, stored = _candidates(want, top, tensor)
    best = _best(want, w, scales, group, importance) if scales.shape[2] > 1 else np.zeros(top.shape, np.int64)
    chosen = np.take_along_axis(scales, best[:, :, None], 2)[:, :, 0]
    codes = small_floats.encode(w, want.element, _by_rows(chosen, high, len(w)), group)
    table = np.take_along_axis(stored, best[:, :, None], 2)[:, :, 0]
    return ScaledFloats(want.element, codes, want.scale, table, want.block, 0, tensor, want.tensor == "divides")


def _empty(want: SmallFloats, w: F32) -> ScaledFloats:
    """Codes of a weight without values: scales of 1."""
    shape = [1 if not size else -(-count // size) for count, size in zip(w.shape, want.block, strict=True)]
    one = {"e8m0": np.uint8(127), "e4m3": np.uint8(0x38)}.get(want.scale, np.float32(1))
    tensor = np.ones(1, np.float32) if want.tensor else None
    table = np.full(shape, one)
    return ScaledFloats(
        want.element, np.empty(w.shape, np.uint8), want.scale, table, want.block, 0, tensor, want.tensor == "divides"
    )


def _tensor_scale(want: SmallFloats, peak: float) -> F32:
    """The scale of the tensor, float32 [1], as it is stored; 1 for a weight of zeros."""
    whole = np.float32(small_floats.ELEMENTS[want.element].largest) * _MOST_E4M3
    if not peak:
        return np.ones(1, np.float32)
    with np.errstate(all="ignore"):
        scale = whole / np.float32(peak) if want.tensor == "divides" else np.float32(peak) / whole
    usable = np.isfinite(scale) and scale > 0
    return np.array([scale if usable else 1], np.float32)


def _candidates(want: SmallFloats, top: F32, tensor: F32 | None) -> tuple[F32, NDArray[Any]]:
    """Candidates for the scales of groups with these largest magnitudes [R, G]: their values with the tensor's scale,
    float32 [R, G, C], and as stored. The first one is the libraries'.
    """
    element = small_floats.ELEMENTS[want.element]
    largest = np.float32(element.largest)
    if want.scale == "e8m0":
        exponent = np.frexp(top)[1] - 1 - int(np.log2(element.largest))
        first = np.where(top > 0, np.clip(exponent + 127, 0, 253), 127)
        stored: NDArray[Any] = np.stack([first, first + (top > 0)], 2).astype(np.uint8)
        return small_floats.values("e8m0")[stored], stored
    if want.scale == "e4m3":
        factor = np.float32(1) if tensor is None else tensor[0] if want.tensor == "multiplies" else 1 / tensor[0]
        with np.errstate(all="ignore"):
            ideal = np.minimum(top / largest / factor, _MOST_E4M3).astype(np.float32)
            lower = np.minimum(ideal * np.float32(1.5), _MOST_E4M3)
        first, second = (x.astype(ml_dtypes.float8_e4m3fn).view(np.uint8).astype(np.int64) for x in (ideal, lower))
        around = np.stack([first, first - 1, first + 1, second], 2)
        stored = np.clip(around, (top > 0)[:, :, None], 0x7E).astype(np.uint8) * (top > 0)[:, :, None]
        table = small_floats.values("e4m3")[stored]
        if tensor is None:
            return table, stored
        return (table / tensor[0] if want.tensor == "divides" else table * tensor[0]).astype(np.float32), stored
    dtype = _FLOATS[want.scale]
    with np.errstate(all="ignore"):
        ideal = np.where(top > 0, np.maximum(top / largest, np.float32(np.finfo(np.float32).tiny)), 1).astype(
            np.float32
        )
        near = ideal.astype(dtype)
    if dtype == np.float32:
        table = near[:, :, None]
        return table, table
    above = np.where(near.astype(np.float32) < ideal, near.view(np.uint16) + np.uint16(1), near.view(np.uint16))
    both = np.stack([near, above.astype(np.uint16).view(dtype)], 2).astype(np.float32)
    both = np.where(np.isfinite(both) & (both > 0), both, _LARGEST[want.scale])
    return both, both


def _best(want: SmallFloats, w: F32, scales: F32, group: int, importance: F32 | None) -> NDArray[np.int64]:
    """The candidate of each block with the least error, int64 [R, G]."""
    high, n = want.block[0], len(w)
    sums = small_floats.errors(w, want.element, _by_rows(scales, high, n), group, importance)
    if high == 0:
        sums = sums.astype(np.float64).sum(0, keepdims=True).astype(np.float32)
    elif high != 1:
        sums = np.add.reduceat(sums.astype(np.float64), np.arange(0, n, high), 0).astype(np.float32)
    return np.asarray(np.argmin(sums, 2), np.int64)


def _by_blocks(top: F32, high: int) -> F32:
    """The largest of each block of rows."""
    return np.maximum.reduceat(top, np.arange(0, len(top), high), 0) if len(top) else top


def _by_rows(scales: F32, high: int, rows: int) -> F32:
    """A scale per row."""
    if high == 1:
        return scales
    return np.broadcast_to(scales, (rows, *scales.shape[1:])) if high == 0 else np.repeat(scales, high, 0)[:rows]
