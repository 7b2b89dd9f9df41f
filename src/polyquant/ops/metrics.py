"""Error metrics between two float arrays, from sums that can be added over row blocks.

SNR     10 log10(sum a^2 / sum (a-b)^2)      dB, infinite if equal
rRMSE   sqrt(sum (a-b)^2 / sum a^2)          relative root mean squared error
cosine  sum ab / sqrt(sum a^2 sum b^2)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from polyquant.ops import native
from polyquant.types import F32

__all__ = ["ErrorSums", "error_sums", "unit_errors"]


@dataclass(frozen=True, slots=True)
class ErrorSums:
    """Sums over `count` pairs (a: original, b: approximation). `a + b` combines two row blocks."""

    count: int = 0
    aa: float = 0.0
    bb: float = 0.0
    ab: float = 0.0
    dd: float = 0.0
    worst: float = 0.0

    def __add__(self, other: ErrorSums) -> ErrorSums:
        return ErrorSums(
            self.count + other.count,
            self.aa + other.aa,
            self.bb + other.bb,
            self.ab + other.ab,
            self.dd + other.dd,
            max(self.worst, other.worst),
        )

    @property
    def finite(self) -> bool:
        """False if either array holds NaN or infinity."""
        return math.isfinite(self.aa + self.bb)

    @property
    def snr(self) -> float:
        """Signal to noise ratio in dB."""
        if self.dd == 0:
            return math.inf
        return 10 * math.log10(self.aa / self.dd) if self.aa > 0 else -math.inf

    @property
    def rrmse(self) -> float:
        """Relative root mean squared error."""
        return math.sqrt(self.dd / self.aa) if self.aa > 0 else (0.0 if self.dd == 0 else math.inf)

    @property
    def cosine(self) -> float:
        """Cosine similarity; 1 if both are zero."""
        norm = math.sqrt(self.aa) * math.sqrt(self.bb)
        return self.ab / norm if norm > 0 else float(self.aa == self.bb)


def error_sums(a: F32, b: F32) -> ErrorSums:
    """Return the sums over two float32 arrays of equal size, accumulated in float64."""
    x, y = np.ascontiguousarray(a, np.float32).reshape(-1), np.ascontiguousarray(b, np.float32).reshape(-1)
    if (lib := native.lib()) is not None:
        return ErrorSums(x.size, *lib.error_sums(x, y))
    p, q = x.astype(np.float64), y.astype(np.float64)
    with np.errstate(invalid="ignore"):
        worst = float(np.abs(x - y).max(initial=0))
        return ErrorSums(x.size, float(p @ p), float(q @ q), float(p @ q), float((p - q) @ (p - q)), worst)


def unit_errors(a: F32, b: F32, unit: int) -> F32:
    """Return sums of a^2, b^2, a b and (a - b)^2 over stretches of `unit` values, float32 [rows, K / unit, 4].

    a, b: float32 [rows, K].
    """
    x, y = np.ascontiguousarray(a, np.float32), np.ascontiguousarray(b, np.float32)
    out = np.empty((len(x), x.shape[1] // unit, 4), np.float32)
    if (lib := native.lib()) is not None and x.size:
        lib.unit_errors(x.reshape(-1), y.reshape(-1), out.reshape(-1))
        return out
    p, q = x.reshape(len(x), -1, unit), y.reshape(len(x), -1, unit)
    with np.errstate(invalid="ignore", over="ignore"):
        d = p - q
        for i, (v, w) in enumerate(((p, p), (q, q), (p, q), (d, d))):
            np.einsum("nuk,nuk->nu", v, w, out=out[:, :, i])
    return out
