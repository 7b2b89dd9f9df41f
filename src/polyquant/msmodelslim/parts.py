"""Parts of one quantized layer, taken from a state dict in the shapes and dtypes that msModelSlim's document gives them."""

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
    """A tensor of a module. Raises InputError if it is not there."""
    name = f"{module}.{part}"
    if name not in weights:
        raise InputError(
            "the state dict lacks a tensor", tensor=name, hint="name the modules: linears=[...], norms=[...]"
        )
    return weights[name]


def table(module: str, part: str, values: NDArray[Any], n: int) -> NDArray[Any]:
    """Scales [n] or [n, g] -> [n, g]. Raises InputError."""
    found = values[:, None] if values.ndim == 1 else values
    if found.ndim != 2 or len(found) != n or not found.shape[1] or found.dtype not in _FLOATS:
        raise InputError(
            f"{part} does not fit the weight",
            tensor=module,
            expected=f"floats [{n}] or [{n}, groups]",
            found=f"{values.dtype} {list(values.shape)}",
        )
    return found


def sized(weights: Mapping[str, NDArray[Any]], module: str, part: str, size: int) -> NDArray[Any]:
    """A part of so many numbers, flat. Raises InputError."""
    found = needed(weights, module, part)
    if found.size != size:
        raise InputError(f"{part} does not fit", tensor=module, expected=[size], found=list(found.shape))
    return found.reshape(-1)


def deq_scale(weights: Mapping[str, NDArray[Any]], module: str, input_scale: NDArray[Any], n: int) -> F32:
    """float32 [n], or [1] where the matrix has one scale: as stored, else input_scale * weight_scale. Raises InputError."""
    found = weights.get(f"{module}.deq_scale")
    if found is None:
        scale = needed(weights, module, "weight_scale").reshape(-1)
        if scale.size not in (1, n):
            raise InputError("weight_scale does not fit", tensor=module, expected=[n], found=list(scale.shape))
        return np.asarray(input_scale.astype(np.float32) * scale.astype(np.float32))
    found = found.reshape(-1)
    if found.size not in (1, n) or found.dtype not in (np.int64, np.float32):
        raise InputError(
            "deq_scale does not fit", tensor=module, expected=f"float32 or int64 [{n}]", found=f"{found.dtype} {list(found.shape)}"
        )  # fmt: skip
    if found.dtype == np.float32:
        return np.ascontiguousarray(found)
    if found.min() < 0 or found.max() >= 1 << 32:
        raise InputError(
            "deq_scale holds more than the bits of a float32", tensor=module, found=f"{found.min()} to {found.max()}"
        )
    return found.astype(np.uint32).view(np.float32)


def quant_bias(
    weights: Mapping[str, NDArray[Any]], module: str, codes: I8, offset: NDArray[Any], deq: F32
) -> NDArray[np.int32]:
    """int32 [n]: as stored, else round(bias / deq_scale - input_offset * sum of a row of codes). Raises InputError."""
    n = len(codes)
    found = weights.get(f"{module}.quant_bias")
    if found is not None:
        if found.size != n or found.dtype.kind not in "iu":
            raise InputError(
                "quant_bias does not fit",
                tensor=module,
                expected=f"int32 [{n}]",
                found=f"{found.dtype} {list(found.shape)}",
            )
        return np.asarray(found.reshape(-1), np.int32)
    moved = int8.quant_bias(weights.get(f"{module}.bias"), deq, offset, affine.row_sums(codes))
    if not (np.abs(moved) < 1 << 31).all():
        raise InputError("quant_bias does not fit 32 bits", tensor=module, hint="look at bias and deq_scale")
    return np.asarray(moved, np.int32)


def projections(module: str, size: int) -> list[tuple[str, slice]]:
    """Where so many scales of the cache belong: the module itself, or k and v of a fused one. Raises InputError."""
    if module.rpartition(".")[2] not in _FUSED:
        return [(module, slice(None))]
    if size % 2:
        raise InputError(
            "the cache of a fused layer has k and v", tensor=module, expected="an even number of channels", found=size
        )
    return [(f"{module}.k_proj", slice(0, size // 2)), (f"{module}.v_proj", slice(size // 2, size))]
