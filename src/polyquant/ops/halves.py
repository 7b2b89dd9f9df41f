"""Tables of scales in 16-bit floats. Native counterpart: native/codecs/number_tables.cpp."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from polyquant.ops import native
from polyquant.types import F32

__all__ = ["narrow", "widen"]

_BFLOAT = np.dtype(ml_dtypes.bfloat16)
_NATIVE = (np.dtype(np.float16), _BFLOAT)


def widen(stored: NDArray[Any]) -> F32:
    """Numbers of any dtype -> float32 of the same shape, C-contiguous; the array itself if it is that."""
    values = np.ascontiguousarray(stored)
    if (lib := native.lib()) is None or values.dtype not in _NATIVE:
        return values.astype(np.float32, copy=False).reshape(stored.shape)
    out = np.empty(stored.shape, np.float32)
    lib.widen(values.reshape(-1).view(np.uint16), out.reshape(-1), values.dtype == _BFLOAT)
    return out


def narrow(values: F32, dtype: np.dtype[Any]) -> tuple[NDArray[Any], bool]:
    """float32 rounded to `dtype`, C-contiguous; False if a number is not finite then, or becomes zero."""
    if (lib := native.lib()) is not None and dtype in _NATIVE:
        out = np.empty(values.shape, dtype)
        flat = np.ascontiguousarray(values).reshape(-1)
        fits: bool = lib.narrow(flat, out.reshape(-1).view(np.uint16), dtype == _BFLOAT)
        return out, fits
    with np.errstate(over="ignore"):
        stored = np.ascontiguousarray(values).astype(dtype)
    back = stored.astype(np.float32)
    return stored, bool(np.isfinite(back).all() and ((back != 0) | (values == 0)).all())
