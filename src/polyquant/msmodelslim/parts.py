"""Parts of one quantized layer from a state dict, in the shapes and dtypes of msModelSlim's specification."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from polyquant.errors import InputError
from polyquant.ops import affine, int8
from polyquant.types import F32, I8

__all__ = ["deq_scale", "needed", "projections", "quant_bias", "sized", "table"]

_FLOATS = (np.dtype(np.float16), np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16))
_FUSED = ("query_key_value", "qkv_proj", "kv_proj")


def needed(weights: Mapping[str, NDArray[Any]], module: str, part: str) -> NDArray[Any]:
    """Return a tensor of a module. Raises InputError if it is missing."""
    name = f"{module}.{part}"
    if name not in weights:
        raise InputError(
            "the state dict lacks a tensor", tensor=name, hint="list the modules: linears=[...], norms=[...]"
        )
    return weights[name]


def table(module: str, part: str, values: NDArray[Any], n: int) -> NDArray[Any]:
    """Return scales [n] or [n, g] as [n, g]. Raises InputError."""
    scales = values[:, None] if values.ndim == 1 else values
    if scales.ndim != 2 or len(scales) != n or not scales.shape[1] or scales.dtype not in _FLOATS:
        raise InputError(
            f"{part} does not fit the weight",
            tensor=module,
            expected=f"floats [{n}] or [{n}, groups]",
            found=f"{values.dtype} {list(values.shape)}",
        )
    return scales


def sized(weights: Mapping[str, NDArray[Any]], module: str, part: str, size: int) -> NDArray[Any]:
    """Return a part of `size` values, flat. Raises InputError."""
    array = needed(weights, module, part)
    if array.size != size:
        raise InputError(f"{part} does not fit", tensor=module, expected=[size], found=list(array.shape))
    return array.reshape(-1)


def deq_scale(weights: Mapping[str, NDArray[Any]], module: str, input_scale: NDArray[Any], n: int) -> F32:
    """Return deq_scale as stored, else input_scale * weight_scale: float32 [n], or [1] for one scale per tensor.

    Raises InputError.
    """
    stored = weights.get(f"{module}.deq_scale")
    if stored is None:
        scale = needed(weights, module, "weight_scale").reshape(-1)
        if scale.size not in (1, n):
            raise InputError("weight_scale does not fit", tensor=module, expected=[n], found=list(scale.shape))
        return np.asarray(input_scale.astype(np.float32) * scale.astype(np.float32))
    stored = stored.reshape(-1)
    if stored.size not in (1, n) or stored.dtype not in (np.int64, np.float32):
        raise InputError(
            "deq_scale does not fit",
            tensor=module,
            expected=f"float32 or int64 [{n}]",
            found=f"{stored.dtype} {list(stored.shape)}",
        )
    if stored.dtype == np.float32:
        return np.ascontiguousarray(stored)
    if stored.min() < 0 or stored.max() >= 1 << 32:
        raise InputError(
            "deq_scale contains more than the bits of a float32",
            tensor=module,
            found=f"{stored.min()} to {stored.max()}",
        )
    return stored.astype(np.uint32).view(np.float32)


def quant_bias(
    weights: Mapping[str, NDArray[Any]], module: str, codes: I8, offset: NDArray[Any], deq: F32
) -> NDArray[np.int32]:
    """Return quant_bias, int32 [n], as stored, else round(bias / deq_scale - input_offset * row sum of codes).

    Raises InputError.
    """
    n = len(codes)
    stored = weights.get(f"{module}.quant_bias")
    if stored is not None:
        if stored.size != n or stored.dtype.kind not in "iu":
            raise InputError(
                "quant_bias does not fit",
                tensor=module,
                expected=f"int32 [{n}]",
                found=f"{stored.dtype} {list(stored.shape)}",
            )
        return np.asarray(stored.reshape(-1), np.int32)
    moved = int8.quant_bias(weights.get(f"{module}.bias"), deq, offset, affine.row_sums(codes))
    if not (np.abs(moved) < 1 << 31).all():
        raise InputError("quant_bias does not fit 32 bits", tensor=module, hint="check bias and deq_scale")
    return np.asarray(moved, np.int32)


def projections(module: str, size: int) -> list[tuple[str, slice]]:
    """Return the modules that `size` cache scales belong to: the module itself, or k and v of a fused one.

    Raises InputError.
    """
    if module.rpartition(".")[2] not in _FUSED:
        return [(module, slice(None))]
    if size % 2:
        raise InputError(
            "the cache of a fused layer has k and v", tensor=module, expected="an even number of channels", found=size
        )
    return [(f"{module}.k_proj", slice(0, size // 2)), (f"{module}.v_proj", slice(size // 2, size))]
