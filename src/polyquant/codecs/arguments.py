"""Checks of the arguments that all codecs share: floats, importance, parts and output arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from polyquant.errors import CodecError
from polyquant.ops import matmul
from polyquant.types import F32, U8, ArraySpec, Codec, Parts, Shape, as_matrix

__all__ = [
    "column_weights",
    "exact_part",
    "finite",
    "matrix_of",
    "non_finite",
    "of_form",
    "output",
    "packed_rows",
    "part",
    "real",
    "stored_bytes",
]

_EXTENDED = {"bfloat16", "float8_e4m3fn", "float8_e5m2"}  # of ml_dtypes; numpy calls their kind "V"


def real(name: str, w: ArrayLike) -> NDArray[Any]:
    """Return `w` as a real array in native byte order. Raises CodecError for anything else."""
    array = np.asarray(w)
    if array.dtype.kind not in "fiub" and array.dtype.name not in _EXTENDED:
        raise CodecError(f"{name} takes real numbers", expected="an array of floats", found=array.dtype)
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def finite(name: str, w: NDArray[Any]) -> F32:
    """Return the weights to quantize as C-contiguous float32. Raises CodecError for NaN and infinity."""
    with np.errstate(over="ignore"):
        floats = np.ascontiguousarray(w, np.float32)
    if not np.isfinite(floats).all():
        raise non_finite(name, w)
    return floats


def non_finite(name: str, w: NDArray[Any]) -> CodecError:
    """Return the error for NaN or infinity, with their count and the first position."""
    wrong = np.argwhere(~np.isfinite(w))
    first = f"{w[tuple(wrong[0])]} at {wrong[0].tolist()}" if len(wrong) else "values beyond the range of float32"
    return CodecError(
        f"{name} cannot quantize NaN or infinity", found=f"{len(wrong):,} of {w.size:,} values, first {first}"
    )


def matrix_of(name: str, shape: Shape) -> tuple[int, int]:
    """N and K. Raises CodecError for a shape that no matrix has."""
    if len(shape) != 2 or min(shape) < 0:
        raise CodecError(f"{name} needs a matrix", expected="[N, K]", found=list(shape))
    return shape[0], shape[1]


def column_weights(importance: ArrayLike | None, k: int) -> F32 | None:
    """Return importance as float32 [K].

    Raises CodecError for a wrong shape and for negative, NaN or infinite values.
    """
    if importance is None:
        return None
    weights = np.ascontiguousarray(real("importance", importance), np.float32)
    if weights.shape != (k,):
        raise CodecError("importance must have one entry per column", expected=(k,), found=weights.shape)
    if not (np.isfinite(weights).all() and (weights >= 0).all()):
        raise CodecError("importance must be finite and non-negative", hint="check which tensor it was measured for")
    return weights


def part(parts: Parts, key: str) -> NDArray[Any]:
    """Return one part as an array. Raises CodecError if it is missing."""
    if not isinstance(parts, Mapping):
        raise CodecError("parts must be a mapping from name to array", found=type(parts).__name__)
    if key not in parts:
        raise CodecError("a part is missing", expected=key, found=", ".join(parts) or "no parts")
    return np.asarray(parts[key])


def exact_part(parts: Parts, key: str, spec: ArraySpec) -> NDArray[Any]:
    """Return a part that has exactly the dtype and shape of `spec`. Raises CodecError otherwise."""
    array = part(parts, key)
    if array.shape != spec.shape or array.dtype != spec.dtype:
        raise CodecError(
            f"part '{key}' does not fit this weight",
            expected=f"{spec.dtype} {list(spec.shape)}",
            found=f"{array.dtype} {list(array.shape)}",
        )
    return array


def stored_bytes(name: str, parts: Parts, key: str, spec: ArraySpec, *, same_shape: bool = False) -> U8:
    """Return a part of packed bytes of exactly the size of `spec`; of its shape too if `same_shape`.

    Raises CodecError.
    """
    array = part(parts, key)
    if array.dtype != np.uint8 or array.nbytes != spec.nbytes or (same_shape and array.shape != spec.shape):
        raise CodecError(
            f"the bytes of part '{key}' do not fit {name} and this shape",
            expected=f"uint8 {list(spec.shape)}" if same_shape else f"{spec.nbytes} bytes",
            found=f"{array.dtype} {list(array.shape)}" if same_shape else f"{array.nbytes} of {array.dtype}",
        )
    return array


def of_form(codec: Codec, codes: object) -> None:
    """Raises CodecError unless the codes to pack have the codec's form."""
    if not isinstance(codes, codec.form):
        raise CodecError(
            f"{codec.name} packs codes of the form {codec.form.__name__}",
            found=type(codes).__name__,
            hint="quantize() and unpack() return codes",
        )


def packed_rows(name: str, parts: Parts, shape: Shape, spec: ArraySpec) -> Any | None:
    """Return a matmul handle (ops/matmul.py) for rows of blocks (part `blocks`), or None without a native kernel.

    Raises CodecError if the part does not fit.
    """
    return matmul.packed(name, stored_bytes(name, parts, "blocks", spec), *as_matrix(shape))


def output(out: F32 | None, shape: Shape) -> F32:
    """Return the array to fill: `out`, or a new cache-line-aligned one if it is None.

    Raises CodecError if `out` does not fit.
    """
    if out is None:
        room = np.empty(math.prod(shape) + 16, np.float32)
        skip = -room.ctypes.data % 64 // 4
        return room[skip : skip + math.prod(shape)].reshape(shape)
    if out.size != math.prod(shape) or out.dtype != np.float32 or not out.flags.c_contiguous or not out.flags.writeable:
        raise CodecError(
            "out must be writeable, C-contiguous float32 of the weight's size",
            expected=shape,
            found=f"{out.dtype} {out.shape}",
        )
    return out
