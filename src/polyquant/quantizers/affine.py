"""A weight to int8 or int4 codes as msModelSlim's files hold them: the grid of the weights, of the inputs, and what the integer sums need.

    inputs    low, high widened to include 0; s = (high - low) / 255, z = round(-low / s) - 128, both as the file stores them
    static    deq_scale = s * the scale of W, quant_bias = round(bias / deq_scale - z * the sum of a row of W's codes)
    sparse    W8A8S: the weights but the 1.1% of greatest magnitude in the matrix (or those beyond three deviations of their row's magnitudes) lie
              within -7 to 7, the rest beyond; none is cut off

All in float32, but for the sums of quant_bias: int64 and float64. The codes of few values that W8A8S has compress well; none is forced to zero.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from polyquant.codecs.affine_reader import FLOAT_TYPES
from polyquant.codecs.msmodelslim import MsModelSlim
from polyquant.errors import CodecError
from polyquant.ops import affine, int8
from polyquant.quantizers import exact_tool
from polyquant.quantizers.exact_tool import Outliers
from polyquant.quantizers.gptq import quantize_gptq
from polyquant.types import F32, Activation, Affine

__all__ = ["FRACTION", "cache_grid", "input_grid", "input_side", "quantize_linear", "sparse_grid"]

FRACTION = 0.011
"""Of the weights of a W8A8S matrix that may lie beyond 4 bits: the tool's default."""

_HINT = "calibrate: --calibration FILE"


def quantize_linear(
    codec: MsModelSlim,
    w: F32,
    *,
    input_range: tuple[float, float] | None = None,
    bias: F32 | None = None,
    hessian: F32 | None = None,
    effort: str = "default",
    exact: np.dtype[Any] | None = None,
    outliers: Outliers = "fraction",
) -> Affine:
    """A weight [N, K] -> codes; of static types with the grid of the inputs, so that `codec.pack` takes them.

    input_range: least and greatest input, for static types. bias: [N], goes into quant_bias. hessian: mean of x x^T over inputs, [K, K]; with
    effort "max" the codes are those of least output error on them. exact: compute as the tool does in this dtype of the model. outliers: of W8A8S. Raises CodecError for
    NaN, infinity, a missing range, and sums that int32 does not hold.
    """
    if exact is not None:
        return exact_tool.quantize_linear(codec, w, exact, input_range=input_range, bias=bias, outliers=outliers)
    searched = codec.kind == "w8a8s" or effort == "max"
    if (
        searched and not np.isfinite(w).all()
    ):  # else `codec.quantize` finds it in the grid, without another pass over the weights
        raise CodecError("holds NaN or infinity", hint="polyquant validate names them all")
    plain = codec if codec.scales or not codec.static else replace(codec, dtype="f32", grid="")
    grid: tuple[F32, F32] | None = None
    if codec.kind == "w8a8s":
        scale = sparse_grid(w, outliers)
        grid = (scale, np.zeros_like(scale))
    if effort == "max":
        found = quantize_gptq(plain, w, hessian, grid)
    elif grid is not None:
        found = Affine(codec.bits, affine.encode(w, *grid, codec.bits, symmetric=True), *grid)
    else:
        found = plain.quantize(w)
    if not codec.static:
        return found
    if input_range is None:
        raise CodecError(f"{codec.name} needs the range of the layer's inputs", hint=_HINT)
    return replace(found, activation=input_side(codec, found, input_range, bias))


def input_side(codec: MsModelSlim, codes: Affine, input_range: tuple[float, float], bias: F32 | None) -> Activation:
    """The grid of the inputs and what their integer sums need, consistent with the scales as the file stores them. Raises CodecError."""
    scale, offset = input_grid(input_range, FLOAT_TYPES[codec.grid or codec.dtype])
    deq = (scale * codes.scale[:, 0]).astype(np.float32)
    if not (np.isfinite(deq).all() and (deq > 0).all()):
        raise CodecError(
            "deq_scale is no positive number", found=f"input scale {scale[0]:g} times {codes.scale.min():g}"
        )
    sums = affine.row_sums(codes.codes)
    shift = np.zeros(len(deq), np.float32) if bias is None else np.asarray(bias, np.float32)
    if not np.isfinite(shift).all():
        raise CodecError("the bias holds NaN or infinity", hint="polyquant validate names them all")
    total = int8.quant_bias(shift, deq, offset, sums)
    if np.abs(total).max(initial=0) >= 2**31:
        row = int(np.abs(total).argmax())
        raise CodecError(
            "quant_bias does not fit int32",
            found=f"{total[row]:.6g} in row {row}",
            hint="keep this layer float: --keep",
        )
    return Activation(scale, offset, deq, total.astype(np.int32))


def input_grid(input_range: tuple[float, float], dtype: np.dtype[Any]) -> tuple[F32, F32]:
    """Scale and offset float32 [1] of inputs from low to high, as `dtype` stores them. Raises CodecError for a range that it cannot hold."""
    low, high = min(0.0, float(input_range[0])), max(0.0, float(input_range[1]))
    with np.errstate(all="ignore"):
        scale = np.float32(np.float32((high - low) / 255).astype(dtype)) if high > low else np.float32(1)
    if not np.isfinite(scale):
        raise CodecError(
            "the range of the layer's inputs is not finite as it is stored", found=f"{low:g} to {high:g}, {dtype}"
        )
    if scale == 0:  # a range below what the dtype tells from 0: the least normal number of half precision
        scale = np.float32(2**-14)
    offset = np.clip(np.rint(-low / float(scale)) - 128, -128, 127)
    return np.array([scale], np.float32), np.array([offset], np.float32)


def cache_grid(low: F32, high: F32, *, symmetric: bool) -> tuple[F32, F32]:
    """Scale and offset float32 [C] of an int8 cache whose channels lie between low and high, [C] each: the formulas of weights, channel by channel."""
    scale, offset = affine.min_max_grid(np.stack([low, high], 1), 1, 8, symmetric=symmetric)
    return scale[:, 0], offset[:, 0]


def sparse_grid(w: F32, outliers: Outliers = "fraction") -> F32:
    """Scale float32 [N, 1] of W8A8S: the greatest inlier of the row is 7, and the greatest weight at most 127."""
    size = np.abs(w)
    if outliers == "sigma":
        limit = 3 * size.std(1, ddof=min(1, w.shape[1] - 1), keepdims=True)
    else:
        most = max(1, int(w.size * FRACTION))
        limit = np.partition(size, w.size - most, None)[w.size - most]
    inlier = np.where(size <= limit, size, 0).max(1, initial=0)
    scale = np.maximum(inlier / np.float32(7), size.max(1, initial=0) / np.float32(127))
    scale[scale == 0] = 1
    return _tightened(w, np.asarray(scale, np.float32)[:, None])


def _tightened(w: F32, scale: F32) -> F32:
    """Of scales [N, 1] up to 4% smaller, by which 7.29 still rounds to 7, those of least error; not where the greatest weight would be cut off."""
    best = np.full((len(w), 1), np.inf, np.float32)
    found, none, out = scale.copy(), np.zeros_like(scale), np.empty(w.shape, np.float32)
    cut = np.abs(w).max(1, initial=0)[:, None]
    for share in (1.0, 0.99, 0.98, 0.97, 0.96):
        s = scale * np.float32(share)
        error = np.square(affine.decode(affine.encode(w, s, none, 8, symmetric=True), s, none, out) - w).sum(1)[:, None]
        better = (error < best) & (cut <= np.float32(127.5) * s)
        best[better], found[better] = error[better], s[better]
    return found
