"""Quantization to int8 or int4 codes for msModelSlim: weight scales, input scales, and corrections of the integer sums.

    inputs    low, high widened to include 0; s = (high - low) / 255, z = round(-low / s) - 128, both as stored
    static    deq_scale = s * scale of W, quant_bias = round(bias / deq_scale - z * row sum of W's codes)
    sparse    W8A8S: all weights except the 1.1% of largest magnitude in the matrix (or those beyond three standard
              deviations of their row's magnitudes) map to -7 to 7, the outliers beyond; nothing is clipped

Arithmetic is float32, except the sums of quant_bias: int64 and float64. The few distinct codes of W8A8S compress well;
none is forced to zero.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from polyquant.codecs.keeping import FLOAT_TYPES
from polyquant.codecs.msmodelslim import MsModelSlim
from polyquant.errors import CodecError
from polyquant.ops import affine, int8
from polyquant.quantizers import exact_tool
from polyquant.quantizers.exact_tool import Outliers
from polyquant.quantizers.gptq import quantize_gptq
from polyquant.types import F32, Activation, Affine

__all__ = ["FRACTION", "cache_grid", "input_grid", "input_side", "quantize_linear", "sparse_grid"]

FRACTION = 0.011
"""Fraction of outliers in a W8A8S matrix that may exceed 4 bits: the tool's default."""

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
    """Quantize a weight [N, K]; codes of static types include the input quantization that `codec.pack` needs.

    input_range: smallest and largest input, for static types. bias: [N], part of quant_bias. hessian: mean of x x^T
    over inputs, [K, K]; with effort "max" the codes minimise the output error. exact: reproduce the tool's arithmetic
    in this model dtype. outliers: for W8A8S. Raises CodecError for NaN, infinity, a missing range, and int32 overflow.
    """
    if exact is not None:
        return exact_tool.quantize_linear(codec, w, exact, input_range=input_range, bias=bias, outliers=outliers)
    searched = codec.kind == "w8a8s" or effort == "max"
    if searched and not np.isfinite(w).all():  # `codec.quantize` detects it without another pass
        raise CodecError("contains NaN or infinity", hint="run polyquant validate to list all of them")
    plain = codec if codec.scales or not codec.static else replace(codec, dtype="f32", grid="")
    grid: tuple[F32, F32] | None = None
    if codec.kind == "w8a8s":
        scale = sparse_grid(w, outliers)
        grid = (scale, np.zeros_like(scale))
    if effort == "max":
        codes = quantize_gptq(plain, w, hessian, grid)
    elif grid is not None:
        codes = Affine(codec.bits, affine.encode(w, *grid, codec.bits, symmetric=True), *grid)
    else:
        codes = plain.quantize(w)
    if not codec.static:
        return codes
    if input_range is None:
        raise CodecError(f"{codec.name} needs the input range of the layer", hint=_HINT)
    return replace(codes, activation=input_side(codec, codes, input_range, bias))


def input_side(codec: MsModelSlim, codes: Affine, input_range: tuple[float, float], bias: F32 | None) -> Activation:
    """Return the input quantization and sum corrections, consistent with the scales as stored. Raises CodecError."""
    scale, offset = input_grid(input_range, FLOAT_TYPES[codec.grid or codec.dtype])
    deq = (scale * codes.scale[:, 0]).astype(np.float32)
    if not (np.isfinite(deq).all() and (deq > 0).all()):
        raise CodecError("deq_scale is not positive", found=f"input scale {scale[0]:g} times {codes.scale.min():g}")
    sums = affine.row_sums(codes.codes)
    shift = np.zeros(len(deq), np.float32) if bias is None else np.asarray(bias, np.float32)
    if not np.isfinite(shift).all():
        raise CodecError("the bias contains NaN or infinity", hint="run polyquant validate to list all of them")
    total = int8.quant_bias(shift, deq, offset, sums)
    if np.abs(total).max(initial=0) >= 2**31:
        row = int(np.abs(total).argmax())
        raise CodecError(
            "quant_bias does not fit int32",
            found=f"{total[row]:.6g} in row {row}",
            hint="keep this layer in float: --keep",
        )
    return Activation(scale, offset, deq, total.astype(np.int32))


def input_grid(input_range: tuple[float, float], dtype: np.dtype[Any]) -> tuple[F32, F32]:
    """Return scale and offset, float32 [1], of an input range, rounded to `dtype`.

    Raises CodecError if they overflow it.
    """
    low, high = min(0.0, float(input_range[0])), max(0.0, float(input_range[1]))
    with np.errstate(all="ignore"):
        scale = np.float32(np.float32((high - low) / 255).astype(dtype)) if high > low else np.float32(1)
    if not np.isfinite(scale):
        raise CodecError("the input range of the layer is not finite as stored", found=f"{low:g} to {high:g}, {dtype}")
    if scale == 0:  # the range underflows the dtype: use the smallest normal half
        scale = np.float32(2**-14)
    offset = np.clip(np.rint(-low / float(scale)) - 128, -128, 127)
    return np.array([scale], np.float32), np.array([offset], np.float32)


def cache_grid(low: F32, high: F32, *, symmetric: bool) -> tuple[F32, F32]:
    """Return scale and offset, float32 [C], of an int8 cache with channel ranges [C]. Same formulas as for weights."""
    scale, offset = affine.min_max_grid(np.stack([low, high], 1), 1, 8, symmetric=symmetric)
    return scale[:, 0], offset[:, 0]


def sparse_grid(w: F32, outliers: Outliers = "fraction") -> F32:
    """Return W8A8S scales, float32 [N, 1]: the largest inlier of a row maps to 7, the largest weight to at most 127."""
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
    """Return the scales [N, 1], up to 4% smaller, with the least error.

    7.29 still rounds to 7; never clips the largest weight.
    """
    best = np.full((len(w), 1), np.inf, np.float32)
    tightest, none, out = scale.copy(), np.zeros_like(scale), np.empty(w.shape, np.float32)
    cut = np.abs(w).max(1, initial=0)[:, None]
    for share in (1.0, 0.99, 0.98, 0.97, 0.96):
        s = scale * np.float32(share)
        error = np.square(affine.decode(affine.encode(w, s, none, 8, symmetric=True), s, none, out) - w).sum(1)[:, None]
        better = (error < best) & (cut <= np.float32(127.5) * s)
        best[better], tightest[better] = error[better], s[better]
    return tightest
