"""Products, factorizations and elementary functions whose bits do not depend on the processor, the number of threads,
the BLAS, or the engine.

Each has a defined order of IEEE operations: numpy references, and native counterparts of the slow ones
(native/exact/exact.hpp).

    product    sum over k in ascending order, in float64, rounded to float32 once. A product of two float32 is exact in
               float64, so a fused addition gives the same
    cholesky   l_ij = (h_ij - sum over ascending k < j of l_ik l_jk) / l_jj in float64: multiply, round, subtract
    functions  polynomials in float64 without fused operations. numpy's use all instructions of the processor, and
               their last bit differs.

Sums along an axis are numpy's: its pairwise order is the same on every processor.
"""

from __future__ import annotations

from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from polyquant.ops import native
from polyquant.types import F32

__all__ = [
    "cholesky",
    "cholesky_reference",
    "column_dots",
    "cos_sin",
    "erfc",
    "exp",
    "exp_reference",
    "gram",
    "log",
    "log1p",
    "power",
    "product",
    "product_reference",
    "softmax",
    "softmax_reference",
    "solve",
    "tanh",
]

F64: TypeAlias = NDArray[np.float64]
I32: TypeAlias = NDArray[np.int32]
A = TypeVar("A", NDArray[np.float32], NDArray[np.float64])

_SUMS = 1 << 15  # float64 sums updated at a time: they stay in the cache
_ROWS = 256  # of the float64 copies of `column_dots`

_LOG2_E = 1.4426950408889634
_LN2 = (float.fromhex("0x1.62e42feep-1"), float.fromhex("0x1.a39ef35793c76p-33"))  # high and low part
_MAGIC = float.fromhex("0x1.8p52")  # in a sum with it, the lowest bits are the nearest integer
_EXP = tuple(1.0 / f for f in (6227020800, 479001600, 39916800, 3628800, 362880, 40320, 5040, 720, 120, 24, 6, 2, 1, 1))

# pi / 2 in parts whose products with integers below 2^20 are exact, and the series on [-pi / 4, pi / 4]
_HALF_PI = tuple(map(float.fromhex, ("0x1.921fb544p+0", "0x1.0b4611a6p-34", "0x1.3198a2e037073p-69")))
_SIN = tuple((-1.0) ** i / f for i, f in enumerate((6, 120, 5040, 362880, 39916800, 6227020800, 1307674368000), 1))
_COS = tuple((-1.0) ** i / f for i, f in enumerate((2, 24, 720, 40320, 3628800, 479001600, 87178291200), 1))


def _kernels() -> Any | None:
    """Return the extension module; None for the numpy engine, and if it was built from older sources."""
    lib = native.lib()
    return lib if lib is not None and hasattr(lib, "exact_product") else None


# ---------------------------------------------------------------- products


def product(a: F32, b: F32) -> F32:
    """Multiply matrices, [..., M, K] @ [..., K, N], with numpy's broadcasting of the leading axes."""
    return _product(a, b, symmetric=False)


def gram(x: F32) -> F32:
    """Return x^T x, [T, K] -> [K, K]: sums over the rows in ascending order."""
    return _product(x.T, x, symmetric=True)


def _product(a: F32, b: F32, *, symmetric: bool) -> F32:
    if (lib := _kernels()) is None:
        return product_reference(a, b)
    lead = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    left, right = (_stack(np.require(x, np.float32, "A"), lead) for x in (a, b))  # maps may be unaligned
    out = np.empty((len(left), left.shape[1], right.shape[2]), np.float32)
    lib.exact_product(left, right, out, symmetric)
    return out.reshape(*lead, *out.shape[1:])


def _stack(x: F32, lead: tuple[int, ...]) -> F32:
    """Return matrices [..., M, K] as [items, M, K], without a copy where possible."""
    if not lead:
        return x[None]
    if x.ndim == 2 or x.shape[:-2] != lead:
        x = np.broadcast_to(x, (*lead, *x.shape[-2:]))
    return x if len(lead) == 1 else x.reshape(-1, *x.shape[-2:])


def product_reference(a: F32, b: F32) -> F32:
    """Compute `product` by rank-1 updates."""
    left, right = np.asarray(a, np.float64), np.asarray(b, np.float64, order="C")
    lead = np.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    rows, columns = left.shape[-2], right.shape[-1]
    out = np.zeros((*lead, rows, columns), np.float32)
    step = max(1, _SUMS // max(1, columns * int(np.prod(lead))))
    with np.errstate(all="ignore"):
        for start in range(0, rows, step):
            some = left[..., start : start + step, :]
            total = np.zeros((*lead, some.shape[-2], columns))
            added = np.empty_like(total)
            for k in range(left.shape[-1]):
                np.multiply(some[..., k, None], right[..., None, k, :], out=added)
                np.add(total, added, out=total)
            out[..., start : start + step, :] = total
    return out


def column_dots(a: F32, b: F32) -> F64:
    """Return the dot products of the columns of two arrays [K, N] -> [N], in ascending order."""
    total = np.zeros(a.shape[1])
    for start in range(0, len(a), _ROWS):
        some = np.array(a[start : start + _ROWS], np.float64, order="C")
        for row in np.multiply(some, b[start : start + _ROWS], out=some):
            total += row
    return total


# ---------------------------------------------------------------- factorizations


def cholesky(h: F64) -> F64:
    """Return the lower factor L of a symmetric matrix H = L L^T [n, n].

    Raises numpy.linalg.LinAlgError if H is not positive definite.
    """
    if (lib := _kernels()) is None:
        return cholesky_reference(h)
    lower = np.array(h, np.float64, order="C")
    if not lib.exact_cholesky(lower):
        raise np.linalg.LinAlgError("Matrix is not positive definite")
    for k in range(len(lower)):  # in place: the matrices are large
        lower[k, k + 1 :] = 0
    return lower


def cholesky_reference(h: F64) -> F64:
    """Compute `cholesky` column by column."""
    lower = np.array(h, np.float64)
    with np.errstate(all="ignore"):
        for k in range(len(lower)):
            if not (lower[k, k] > 0 and np.isfinite(lower[k, k])):
                raise np.linalg.LinAlgError("Matrix is not positive definite")
            lower[k, k] = np.sqrt(lower[k, k])
            lower[k + 1 :, k] /= lower[k, k]
            column = lower[k + 1 :, k]
            lower[k + 1 :, k + 1 :] -= column[:, None] * column
    return np.tril(lower)


def solve(h: F64, b: F64) -> F64:
    """Solve H x = b for a symmetric positive definite H [n, n] and b [n]. Raises numpy.linalg.LinAlgError."""
    lower, x = cholesky(h), np.array(b, np.float64)
    for k in range(len(x)):
        x[k] = (x[k] - (lower[k, :k] * x[:k]).sum()) / lower[k, k]
    for k in range(len(x) - 1, -1, -1):
        x[k] /= lower[k, k]
        x[:k] -= lower[k, :k] * x[k]
    return x


# ---------------------------------------------------------------- functions


def exp(x: A) -> A:
    """Return e^x, computed in float64, in the type of x."""
    if (lib := _kernels()) is None:
        return exp_reference(x.astype(np.float64)).astype(x.dtype)
    flat = np.ascontiguousarray(x).reshape(-1)
    out = np.empty_like(flat)
    (lib.exact_float_exponential if flat.dtype == np.float32 else lib.exact_exponential)(flat, out)
    return out.reshape(x.shape)


def exp_reference(x: F64) -> F64:
    """Compute `exp`: 2^n e^r, x = n ln 2 + r, and the series of e^r."""
    with np.errstate(all="ignore"):
        n = (x * _LOG2_E + _MAGIC) - _MAGIC
        r = (x - n * _LN2[0]) - n * _LN2[1]
        y = np.full_like(r, _EXP[0])
        for term in _EXP[1:]:
            y = y * r + term
        first = n * 0.5 + _MAGIC
        second = (n - (first - _MAGIC)) + _MAGIC
        y = y * _two_to(first) * _two_to(second)
        return np.where(x > 710.0, np.inf, np.where(x < -746.0, 0.0, y))


def softmax(scores: F32, low: I32, high: I32, scale: float, sinks: F32 | None = None) -> F32:
    """Return the softmax of the columns low to high - 1 of each row of scale * scores [R, S]; other columns are 0.

    low, high: [R]. sinks: [R], an extra score without a weight. May change `scores`.
    """
    if (lib := _kernels()) is None:
        return softmax_reference(scores, low, high, scale, sinks)
    out = np.ascontiguousarray(scores, np.float32)
    lib.exact_softmax(out, low, high, scale, sinks)
    return out


def softmax_reference(scores: F32, low: I32, high: I32, scale: float, sinks: F32 | None = None) -> F32:
    """Compute `softmax`. Sums: every eighth column in float64, then these eight sums in pairs."""
    columns = np.arange(scores.shape[1], dtype=np.int32)
    visible = (columns >= low[:, None]) & (columns < high[:, None])
    with np.errstate(invalid="ignore"):
        scaled = np.where(visible, scores * np.float32(scale), np.float32(-np.inf))
        top = scaled.max(1) if sinks is None else np.maximum(scaled.max(1), sinks)
        weights = exp_reference((scaled - top[:, None]).astype(np.float64)).astype(np.float32)
        lanes = np.zeros((len(scores), -(-scores.shape[1] // 8) * 8))
        lanes[:, : scores.shape[1]] = weights
        lanes = lanes.reshape(len(scores), -1, 8).sum(1)
        for width in (4, 2, 1):
            lanes = lanes[:, :width] + lanes[:, width : 2 * width]
        if sinks is not None:
            lanes += exp_reference((sinks - top).astype(np.float64)).astype(np.float32)[:, None]
        return np.asarray(weights / lanes.astype(np.float32), np.float32)


def _two_to(whole: F64) -> F64:
    """Return 2^n for the integers n in the lowest bits of n + 1.5 * 2^52."""
    bits = (np.ascontiguousarray(whole).view(np.uint64) << np.uint64(52)) + np.uint64(1023 << 52)
    return np.asarray(bits.view(np.float64))


def log(x: F64) -> F64:
    """Return ln x: x = 2^e m, and the series of 2 artanh((m - 1) / (m + 1))."""
    with np.errstate(all="ignore"):
        m, e = np.frexp(np.asarray(x, np.float64))
        small = m < 0.7071067811865476
        m, e = np.where(small, m + m, m), e - small
        s = (m - 1.0) / (m + 1.0)
        square = s * s
        y = np.full_like(s, 1 / 21)
        for odd in range(19, 0, -2):
            y = y * square + 1 / odd
        y = e * _LN2[0] + (e * _LN2[1] + 2.0 * s * y)
        y = np.where(x == 0, -np.inf, np.where(x == np.inf, np.inf, y))
        return np.asarray(np.where(x < 0, np.nan, y), np.float64)


def log1p(x: F64) -> F64:
    """Return ln(1 + x) for x >= 0."""
    series = x * (1.0 + x * (-0.5 + x * (1 / 3 + x * (-0.25 + x * 0.2))))
    return np.where(x < 1e-3, series, log(1.0 + x))


def power(x: F64, exponent: float) -> F64:
    """Return x^exponent for x >= 0 and a positive exponent."""
    return exp(log(x) * exponent)


def tanh(x: F64) -> F64:
    """Return tanh x, by its series near 0."""
    square = x * x
    series = x * (1.0 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    return np.where(np.abs(x) < 0.02, series, 1.0 - 2.0 / (exp(2.0 * x) + 1.0))


def cos_sin(x: F64) -> tuple[F64, F64]:
    """Return cos x and sin x, for |x| below 10^6."""
    n = np.rint(x * 0.6366197723675814)
    r = ((x - n * _HALF_PI[0]) - n * _HALF_PI[1]) - n * _HALF_PI[2]
    square = r * r
    sine, cosine = np.full_like(r, _SIN[-1]), np.full_like(r, _COS[-1])
    for of_sine, of_cosine in zip(_SIN[-2::-1], _COS[-2::-1], strict=True):
        sine, cosine = sine * square + of_sine, cosine * square + of_cosine
    sine, cosine = r + r * (square * sine), 1.0 + square * cosine
    quarter = n.astype(np.int64) & 3
    swapped = (quarter & 1) == 1
    c, s = np.where(swapped, sine, cosine), np.where(swapped, cosine, sine)
    return np.where((quarter == 1) | (quarter == 2), -c, c), np.where(quarter >= 2, -s, s)


_ERFC = (
    *(-0.65132685989085472, 0.64196979235649026, 0.019476473204185836, -0.0095615147868086316, -0.00094659534448203687),
    *(0.00036683949785276145, 4.2523324806907772e-5, -2.0278578112534243e-5, -1.6242900046470255e-6),
    *(1.3036558355805232e-6, 1.5626441722066143e-8, -8.5238095914926543e-8, 6.5290544390988515e-9),
    *(5.0593434955514689e-9, -9.9136415649303309e-10, -2.2736512229318359e-10, 9.6467911020155268e-11),
    *(2.3940380830391147e-12, -6.8860275264975534e-12, 8.9448792730907257e-13, 3.1309213993429581e-13),
    *(-1.1270822361367252e-13, 3.8109052551892321e-16, 7.106097613609237e-15),
)
"""Chebyshev coefficients of ln(erfc(z) / t) + z^2 in 2 t - 1, t = 2 / (2 + z), z >= 0."""


def erfc(x: F64) -> F64:
    """Return 1 - erf x, with a small relative error also where it is small."""
    z = np.abs(x)
    t = 2.0 / (2.0 + z)
    y = 2.0 * t - 1.0
    last, before = np.zeros_like(z), np.zeros_like(z)
    for c in _ERFC[:0:-1]:
        last, before = 2.0 * y * last - before + c, last
    with np.errstate(over="ignore", invalid="ignore"):
        out = t * exp(_ERFC[0] + y * last - before - z * z)
    return np.asarray(np.where(x < 0, 2.0 - out, out), np.float64)
