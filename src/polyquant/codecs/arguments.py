"""What callers hand to a codec, checked once, the same for all: floats, importance, parts, the array to fill."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from polyquant.errors import CodecError
from polyquant.ops import matmul
from polyquant.types import F32, U8, ArraySpec, Parts, Shape, as_matrix

__all__ = [
    "column_weights",
    "exact_part",
    "finite",
    "non_finite",
    "output",
    "packed_rows",
    "part",
    "real",
    "stored_bytes",
]

_EXTENDED = {"bfloat16", "float8_e4m3fn", "float8_e5m2"}  # of ml_dtypes; numpy calls their kind "V"


def real(name: str, w: ArrayLike) -> NDArray[Any]:
    """An array of real numbers in the machine's byte order. Raises CodecError for anything else."""
    found = np.asarray(w)
    if found.dtype.kind not in "fiub" and found.dtype.name not in _EXTENDED:
        raise CodecError(f"{name} takes real numbers", expected="an array of floats", found=found.dtype)
    return found if found.dtype.isnative else found.astype(found.dtype.newbyteorder("="))


def finite(name: str, w: NDArray[Any]) -> F32:
    """The weights that are to be quantized, C-contiguous float32. Raises CodecError for NaN and infinity, which no code stands for."""
    with np.errstate(over="ignore"):
        floats = np.ascontiguousarray(w, np.float32)
    if not np.isfinite(floats).all():
        raise non_finite(name, w)
    return floats


def non_finite(name: str, w: NDArray[Any]) -> CodecError:
    """What quantizing NaN or infinity raises: how many there are, and where the first is."""
    wrong = np.argwhere(~np.isfinite(w))
    first = f"{w[tuple(wrong[0])]} at {wrong[0].tolist()}" if len(wrong) else "values beyond the range of float32"
    return CodecError(
        f"{name} cannot quantize NaN or infinity", found=f"{len(wrong):,} of {w.size:,} values, first {first}"
    )


def column_weights(importance: ArrayLike | None, k: int) -> F32 | None:
    """importance as float32 [K]. Raises CodecError for another shape, and for what is negative, NaN or infinite."""
    if importance is None:
        return None
    found = np.ascontiguousarray(real("importance", importance), np.float32)
    if found.shape != (k,):
        raise CodecError("importance must have one entry per column", expected=(k,), found=found.shape)
    if not (np.isfinite(found).all() and (found >= 0).all()):
        raise CodecError("importance must be finite and not negative", hint="see which tensor it was measured for")
    return found


def part(parts: Parts, key: str) -> NDArray[Any]:
    """One part as an array. Raises CodecError if it is not there."""
    if key not in parts:
        raise CodecError("a part is missing", expected=key, found=", ".join(parts) or "no parts")
    return np.asarray(parts[key])


def exact_part(parts: Parts, key: str, spec: ArraySpec) -> NDArray[Any]:
    """A part of exactly the dtype and shape that `spec` says. Raises CodecError."""
    found = part(parts, key)
    if found.shape != spec.shape or found.dtype != spec.dtype:
        raise CodecError(
            f"part '{key}' does not fit this weight",
            expected=f"{spec.dtype} {list(spec.shape)}",
            found=f"{found.dtype} {list(found.shape)}",
        )
    return found


def stored_bytes(name: str, parts: Parts, key: str, spec: ArraySpec, *, same_shape: bool = False) -> U8:
    """A part of packed bytes of exactly the size that `spec` says, in any shape unless `same_shape`. Raises CodecError."""
    found = part(parts, key)
    if found.dtype != np.uint8 or found.nbytes != spec.nbytes or (same_shape and found.shape != spec.shape):
        raise CodecError(
            f"the bytes of part '{key}' do not fit {name} and this shape",
            expected=f"uint8 {list(spec.shape)}" if same_shape else f"{spec.nbytes} bytes",
            found=f"{found.dtype} {list(found.shape)}" if same_shape else f"{found.nbytes} of {found.dtype}",
        )
    return found


def packed_rows(name: str, parts: Parts, shape: Shape, spec: ArraySpec) -> Any | None:
    """A handle for multiplication (ops/matmul.py) of rows of blocks, part `blocks`; None without a native kernel. Raises CodecError."""
    return matmul.packed(name, stored_bytes(name, parts, "blocks", spec), *as_matrix(shape))


def output(out: F32 | None, shape: Shape) -> F32:
    """The array to fill: `out` if it fits, else a new one that begins with a cache line. Raises CodecError."""
    if out is None:
        room = np.empty(math.prod(shape) + 16, np.float32)
        skip = -room.ctypes.data % 64 // 4
        return room[skip : skip + math.prod(shape)].reshape(shape)
    if out.size != math.prod(shape) or out.dtype != np.float32 or not out.flags.c_contiguous or not out.flags.writeable:
        raise CodecError(
            "out must be writeable C-contiguous float32 of the weight's size",
            expected=shape,
            found=f"{out.dtype} {out.shape}",
        )
    return out
