"""Float arithmetic that codecs share, in the exact order and rounding of ggml's C code. Twin: native/round.hpp."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyquant.types import F32, U8

__all__ = ["clamp", "from_half", "half_away", "inverse", "sequential_sum", "to_half"]


def from_half(fields: U8) -> F32:
    """fp16 fields uint8 [n, 2 * m] -> float32 [n, m]."""
    return np.ascontiguousarray(fields).view(np.float16).astype(np.float32)


def to_half(x: F32) -> U8:
    """float32 [n, m] -> fp16 fields uint8 [n, 2 * m], half to even; too large becomes infinity."""
    with np.errstate(all="ignore"):
        return np.ascontiguousarray(x).astype(np.float16).view(np.uint8)


def clamp(x: F32, low: float, high: float) -> F32:
    """Into [low, high]; NaN gives low."""
    return np.fmin(np.fmax(x, np.float32(low)), np.float32(high))


def half_away(x: F32) -> NDArray[Any]:
    """Round half away from zero, as C's roundf: the addend is the float below one half, so 0.49999997 stays below 1."""
    return np.trunc(x + np.copysign(np.float32(0.49999997), x))


def inverse(d: F32) -> F32:
    """1 / d, or 0 where that is no finite number: such a block stores zeros."""
    with np.errstate(all="ignore"):
        r = np.float32(1) / d
    return np.where(np.isfinite(r), r, np.float32(0))


def sequential_sum(x: F32) -> F32:
    """Sum over the last axis from left to right (numpy's own sum adds pairwise), kept as an axis of 1."""
    return np.add.accumulate(x, axis=-1, dtype=np.float32)[..., -1:]
