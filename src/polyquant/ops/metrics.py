"""Error metrics between two float arrays, from sums that can be added over row blocks.

SNR     10 log10(sum a^2 / sum (a-b)^2)      dB, infinite if equal
rRMSE   sqrt(sum (a-b)^2 / sum a^2)          relative root mean squared error
cosine  sum ab / sqrt(sum a^2 sum b^2)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from polyquant.ops import native
from polyquant.types import F32, U8

__all__ = ["ErrorSums", "compares_stored", "error_sums", "stored_errors", "stored_unit_errors", "unit_errors"]


F64: TypeAlias = NDArray[np.float64]
_LANES, _STRETCH = 16, 512
"""As in native/codecs/metrics.cpp."""
_AT_ONCE = 1 << 18


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

    def columns(self) -> dict[str, float]:
        """The figures as columns of a row: SNR in dB, relative RMS error, cosine, largest absolute error."""
        return {"snr_db": self.snr, "rrmse": self.rrmse, "cosine": self.cosine, "max_error": self.worst}

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
    """Return the sums over two float32 arrays of equal size, accumulated in float64, in the same order everywhere."""
    x, y = np.ascontiguousarray(a, np.float32).reshape(-1), np.ascontiguousarray(b, np.float32).reshape(-1)
    if (lib := native.lib()) is not None:
        return ErrorSums(x.size, *lib.error_sums(x, y))
    sums = np.zeros(4)
    worst = 0.0
    whole = x.size - x.size % _STRETCH
    with np.errstate(all="ignore"):
        for at in range(0, whole, _AT_ONCE):
            part = slice(at, min(at + _AT_ONCE, whole))
            sums = _in_order(sums, _stretches(x[part], y[part]))
            worst = max(worst, float(np.fmax.reduce(np.abs(x[part] - y[part]), initial=0)))
        sums = _in_order(sums, _products(x[whole:].astype(np.float64), y[whole:].astype(np.float64)))
        worst = max(worst, float(np.fmax.reduce(np.abs(x[whole:] - y[whole:]), initial=0)))
    aa, bb, ab, dd = map(float, sums)
    return ErrorSums(x.size, aa, bb, ab, dd, worst)


def stored_errors(a: str, x: U8, b: str, y: U8, count: int) -> ErrorSums | None:
    """Return `error_sums` of `count` weights stored in the blocks of codecs a and b, bit for bit.

    x, y: uint8 [rows, bytes]. A few blocks at a time are decoded, in the processor's cache. None without kernels for
    both codecs.
    """
    lib = native.lib()
    found = None if lib is None else lib.stored_errors(a, b, x.reshape(-1), y.reshape(-1))
    return None if found is None else ErrorSums(count, *found)


def _products(x: NDArray[Any], y: NDArray[Any]) -> NDArray[Any]:
    """Return the terms of the sums, [..., 4]."""
    d = x - y
    return np.stack([x * x, y * y, x * y, d * d], -1)


def _in_order(first: F64, terms: F64) -> F64:
    """Add terms [n, 4] to [4] one by one, as the native kernel does: the order decides the last bits."""
    return np.asarray(np.concatenate([first[None], terms]).cumsum(0)[-1], np.float64)


def _stretches(x: F32, y: F32) -> F64:
    """Return the sums of every stretch, [n, 4]: 16 sums in float32, then in float64.

    In float64 alone where float32 would overflow or lose precision.
    """
    terms = _products(x, y).reshape(-1, _STRETCH // _LANES, _LANES, 4)
    lanes = terms[:, 0].copy()
    for i in range(1, terms.shape[1]):
        lanes += terms[:, i]
    out = np.zeros((len(lanes), 4))
    for j in range(_LANES):
        out += lanes[:, j]
    aa, bb, _, dd = out.T
    a, b = x.reshape(-1, _STRETCH), y.reshape(-1, _STRETCH)
    precise = (aa > 1e-20) & (aa < 1e30) & (bb < 1e30) & ((dd > 1e-30) | (a == b).all(1))
    for i in np.flatnonzero(~precise).tolist():
        out[i] = _in_order(np.zeros(4), _products(a[i].astype(np.float64), b[i].astype(np.float64)))
    return out


def unit_errors(a: F32, b: F32, unit: int) -> F32:
    """Return sums of a^2, b^2, a b and (a - b)^2 over stretches of `unit` values, float32 [4, rows, K / unit].

    a, b: float32 [rows, K].
    """
    x, y = np.ascontiguousarray(a, np.float32), np.ascontiguousarray(b, np.float32)
    out = np.empty((4, len(x), x.shape[1] // unit), np.float32)
    if (lib := native.lib()) is not None and x.size:
        lib.unit_errors(x.reshape(-1), y.reshape(-1), out.reshape(-1))
        return out
    p, q = x.reshape(len(x), -1, unit), y.reshape(len(x), -1, unit)
    with np.errstate(invalid="ignore", over="ignore"):
        d = p - q
        for sums, (v, w) in zip(out, ((p, p), (q, q), (p, q), (d, d)), strict=True):
            np.einsum("nuk,nuk->nu", v, w, out=sums)
    return out


def compares_stored(a: str, b: str, unit: int) -> bool:
    """True if `stored_unit_errors` has kernels for these codecs, and their blocks divide `unit`."""
    nothing = np.empty(0, np.uint8)
    lib = native.lib()
    return lib is not None and bool(lib.stored_unit_errors(a, b, nothing, nothing, unit, np.empty(0, np.float32)))


def stored_unit_errors(a: str, x: U8, b: str, y: U8, unit: int, units: int) -> F32:
    """Return `unit_errors` of rows stored in the blocks of codecs a and b, float32 [4, rows, units].

    x, y: uint8 [rows, bytes]. A few units at a time are decoded, in the processor's cache. Only if `compares_stored`.
    """
    out = np.empty((4, len(x), units), np.float32)
    lib = native.lib()
    assert lib is not None
    lib.stored_unit_errors(a, b, x.reshape(-1), y.reshape(-1), unit, out.reshape(-1))
    return out
