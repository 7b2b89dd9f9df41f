"""Float arithmetic shared by codecs, in the exact order and rounding of ggml's C code.

Native counterpart: native/base/round.hpp.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyquant.types import F32, U8

__all__ = ["clamp", "from_half", "half_away", "inverse", "sequential_sum", "to_half"]


def from_half(fields: U8) -> F32:
    """Convert fp16 fields uint8 [n, 2 * m] to float32 [n, m]."""
    return np.ascontiguousarray(fields).view(np.float16).astype(np.float32)


def to_half(x: F32) -> U8:
    """Convert float32 [n, m] to fp16 fields uint8 [n, 2 * m], half to even; overflow becomes infinity."""
    with np.errstate(all="ignore"):
        return np.ascontiguousarray(x).astype(np.float16).view(np.uint8)


def clamp(x: F32, low: float, high: float) -> F32:
    """Clamp to [low, high]; NaN becomes low."""
    return np.fmin(np.fmax(x, np.float32(low)), np.float32(high))


def half_away(x: F32) -> NDArray[Any]:
    """Round half away from zero, as C's roundf: the addend is the float below one half, so 0.49999997 stays below 1."""
    return np.trunc(x + np.copysign(np.float32(0.49999997), x))


def inverse(d: F32) -> F32:
    """Return 1 / d, or 0 if that is not finite: such a block stores zeros."""
    with np.errstate(all="ignore"):
        r = np.float32(1) / d
    return np.where(np.isfinite(r), r, np.float32(0))


def sequential_sum(x: F32) -> F32:
    """Sum over the last axis from left to right (numpy's own sum is pairwise), kept as an axis of size 1."""
    return np.add.accumulate(x, axis=-1, dtype=np.float32)[..., -1:]
