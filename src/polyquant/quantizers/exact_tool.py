"""Bit-exact reproduction of msModelSlim 26.1.0: its formulas in the model's dtype, with every operation rounded to it.

    per channel, per tensor   in the model's dtype; the older calibrator (scales in it) clips symmetric codes to
                              -127, the command line (float32 scales) to -128, which bfloat16 does reach because it
                              cannot represent 127.5
    per group                 in float32
    W8A8S                     in float32: inliers w / s, outliers w * (7 / largest inlier); scale and deq_scale in the
                              model's dtype; with 3-sigma outliers: always w / s, scale and deq_scale in float32
    inputs                    s = (max - min) / 255 and z = round(-min / s) - 128 in the model's dtype
    deq_scale                 input_scale * weight_scale in the model's dtype, stored as float32
    quant_bias                round(bias / deq_scale - input_offset * row sum of the codes) in float32
    cache C8                  per channel in the model's dtype: x / s + z

Derived from its Python sources and the results of its compiled functions; checked on tests/vectors/msmodelslim. This
repeats its half-precision rounding errors; the default arithmetic of quantizers/affine.py is more accurate.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from polyquant.codecs.msmodelslim import MsModelSlim
from polyquant.errors import CodecError
from polyquant.types import F32, I8, Activation, Affine

__all__ = ["Outliers", "exact_codes", "exact_grid", "exact_input_side", "quantize_linear"]

_Array: TypeAlias = NDArray[Any]
Outliers = Literal["fraction", "sigma"]
"""Outliers of W8A8S, which may exceed 4 bits: a fraction of the matrix, or values beyond three sigma of the row."""
_FRACTION = 0.011


def quantize_linear(
    codec: MsModelSlim,
    w: F32,
    dtype: np.dtype[Any],
    *,
    input_range: tuple[float, float] | None = None,
    bias: F32 | None = None,
    outliers: Outliers = "fraction",
) -> Affine:
    """Quantize a weight [N, K] of a model of `dtype`.

    outliers: for W8A8S. Raises CodecError for NaN, infinity, and a missing range.
    """
    if not np.isfinite(w).all():
        raise CodecError("contains NaN or infinity", hint="run polyquant validate to list all of them")
    sigma = codec.kind == "w8a8s" and outliers == "sigma"
    if codec.kind == "w8a8s":
        codes, scale = _sigma(w) if sigma else _sparse(w, dtype)
        offset = np.zeros_like(scale)
    else:
        codes, scale, offset = _min_max(codec, w, dtype)
    quantized = Affine(codec.bits, codes, scale, offset)
    if not codec.static:
        return quantized
    if input_range is None:
        raise CodecError(f"{codec.name} needs the input range of the layer", hint="calibrate: --calibration FILE")
    side = exact_input_side(quantized, dtype, input_range, bias, product=np.dtype(np.float32) if sigma else dtype)
    return Affine(codec.bits, codes, scale, offset, side)


def _min_max(codec: MsModelSlim, w: F32, dtype: np.dtype[Any]) -> tuple[I8, F32, F32]:
    """Return min-max codes [N, K], scale and offset [N, G]."""
    rows, k = w.shape
    kind = np.dtype(np.float32) if codec.group else dtype
    grouped = w.astype(kind).reshape(1 if codec.tensor else rows, -1, codec.group or (w.size if codec.tensor else k))
    scale, offset = exact_grid(grouped.min(2), grouped.max(2), codec.bits, symmetric=not codec.asymmetric)
    narrow = not codec.asymmetric and (codec.dtype != "f32" or bool(codec.group))
    codes = exact_codes(grouped, scale[:, :, None], offset[:, :, None], codec.bits, narrow=narrow).reshape(w.shape)
    shape = (rows, scale.shape[1])
    return codes, _full_table(scale, shape), _full_table(offset, shape)


def _full_table(values: _Array, shape: tuple[int, int]) -> F32:
    return np.broadcast_to(values.astype(np.float32), shape).copy()


def exact_grid(low: _Array, high: _Array, bits: int, *, symmetric: bool) -> tuple[_Array, _Array]:
    """Return scale and offset for ranges low to high, in their dtype and shape; scale 1 for an empty range."""
    kind, top = low.dtype.type, 2 ** (bits - 1) - 1
    with np.errstate(all="ignore"):
        if symmetric:
            size = np.maximum(np.abs(low), np.abs(high))
            scale = np.where(size > 0, size / kind(top), kind(1))
            return np.where(scale > 0, scale, kind(1)), np.zeros_like(scale)
        low, high = np.minimum(low, kind(0)), np.maximum(high, kind(0))
        scale = (high - low) / kind(2 * top + 1)
        scale = np.where(scale > 0, scale, kind(1))
        return scale, np.rint(-low / scale) - kind(top + 1)


def exact_codes(x: _Array, scale: _Array, offset: _Array, bits: int, *, narrow: bool) -> I8:
    """Return int8 codes of x; scale and offset have its dtype. narrow: clip at -127 instead of -128."""
    high = 2 ** (bits - 1) - 1
    with np.errstate(all="ignore"):
        rounded = np.rint(x / scale + offset).astype(np.float32)
    return np.clip(rounded, -high if narrow else -high - 1, high).astype(np.int8)


def _sparse(w: F32, dtype: np.dtype[Any]) -> tuple[I8, F32]:
    """Return W8A8S codes [N, K] and scales [N, 1]."""
    size = np.abs(w)
    most = max(1, int(w.size * _FRACTION))
    limit = np.partition(size, w.size - most, None)[w.size - most]
    top = np.where(size <= limit, size, 0).max(1, keepdims=True)
    top[top == 0] = 7
    seven = np.float32(7)
    rounded = np.where(size <= limit, np.rint(w / (top / seven)), np.rint(w * (seven / top)))
    return np.clip(rounded, -128, 127).astype(np.int8), (top / seven).astype(dtype).astype(np.float32)


def _sigma(w: F32) -> tuple[I8, F32]:
    """Return W8A8S codes and scales with outliers beyond three standard deviations of the row's magnitudes."""
    size = np.abs(w)
    limit = 3 * size.std(1, ddof=min(1, w.shape[1] - 1), keepdims=True)
    top = np.where(size <= limit, size, 0).max(1, keepdims=True)
    top[top == 0] = 7
    scale = top / np.float32(7)
    return np.clip(np.rint(w / scale), -128, 127).astype(np.int8), scale


def exact_input_side(
    codes: Affine, dtype: np.dtype[Any], input_range: tuple[float, float], bias: F32 | None, *, product: np.dtype[Any]
) -> Activation:
    """Return the input quantization, deq_scale (multiplied in the dtype `product`) and quant_bias."""
    low, high = (np.array([x]).astype(dtype) for x in input_range)
    scale, offset = exact_grid(low, high, 8, symmetric=False)
    deq = (scale.astype(product) * codes.scale[:, 0].astype(product)).astype(np.float32)
    sums = codes.codes.sum(1, dtype=np.int64).astype(np.float32)
    shift = np.float32(0) if bias is None else bias.astype(np.float32) / deq
    total = np.rint(shift - offset.astype(np.float32) * sums)
    if not np.isfinite(total).all() or np.abs(total).max(initial=0) >= 2**31:
        raise CodecError("quant_bias does not fit int32", found=f"up to {np.abs(total).max():g}")
    return Activation(scale.astype(np.float32), offset.astype(np.float32), deq, total.astype(np.int32))
