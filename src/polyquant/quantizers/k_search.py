"""Search for ggml's K types: super-scales, integer sub-scales and codes of least weighted squared error.

A tile holds super-blocks as x [W, n, S]: weight i of each of S sub-blocks of n super-blocks. The objective is the
actual error, the sum of importance * (w - decoded w)^2, with importance 1 by default. Two steps, both by measured
error:

1. real-valued: per sub-block, least squares for the scale (and minimum) on the codes of a few starting scales;
2. stored: super-scales in fp16 such that the largest sub-scale becomes the integer `anchor`; then the sub-block's best
   integers in a window around the target; then super-scales by least squares on these codes, and a smaller window.

Blocks that are exact except for the rounding of their super-scales (one-hot, constant, ternary rows) try more anchors.
Affine blocks mostly above zero are encoded negated, with both super-scales negative, since a minimum can only reach
below zero.

Byte layout: codecs/ggml_k.py. native/codecs/ggml_k_quantize.cpp does the same operations in the same order, in float32
without fused multiply-add, so bytes are equal. Sums therefore run in index order, and comparisons treat NaN the same
way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from polyquant.codecs.ggml_k import pack_q2_k, pack_q3_k, pack_q4_k, pack_q5_k, pack_q6_k
from polyquant.types import F32, I8, U8

__all__ = ["Grid", "affine", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "symmetric"]

_f = np.float32
_MAGIC = _f(12582912)  # 1.5 * 2^23: adding and subtracting it rounds to integer, half to even
_HUGE = _f(1e9)  # beyond what fp16 scales can express; keeps every sum finite
_TINY_HALF, _MAX_HALF = _f(2.0**-24), _f(65504)
_SINGULAR = _f(1e-4)  # a determinant below this fraction of its terms is rounding noise
_MARGIN = _f(1.000001)  # keeps rounding noise from replacing the natural start
_EXACT = _f(2.0**-20)  # fraction of the energy; a smaller error is only the rounding of super-scales
_LEAST = _f(2.0**-20)  # lower bound of importance, relative to the block's largest
_AFFINE_STARTS = [_f(t) for t in (0, -0.3, 0.3, -0.6, 0.6, -0.9, 0.9)]
_SYMMETRIC_STARTS = [_f(t) for t in (0, -0.4, 0.4, -0.8, 0.8)]

_ZERO = np.zeros((1, 1), np.float32)  # the minimum of symmetric types

_Pair: TypeAlias = tuple[F32, F32]
_State: TypeAlias = tuple[F32, ...]
"""Super-scales [n, 1], integers [n, S] as floats, and finally the error [n, S]."""


def _total(a: F32) -> F32:
    """Sum over the first axis, in index order."""
    out = np.zeros(a.shape[1:], np.float32)
    for part in a:
        out += part
    return out


def _over_block(a: F32) -> F32:
    """Sum [n, S] -> [n, 1], in index order."""
    return _total(a.T)[:, None]


def _clamp(v: F32, lo: Any, hi: Any) -> F32:
    """Clamp to [lo, hi]; NaN becomes lo."""
    return np.where(v > _f(lo), np.minimum(v, _f(hi)), _f(lo))


def _nearest(v: F32, lo: int, hi: int) -> F32:
    return (_clamp(v, lo, hi) + _MAGIC) - _MAGIC


def _inverse(v: F32) -> F32:
    return np.where(v != 0, _f(1) / v, _f(0))


def _super_scale(v: F32) -> F32:
    """Round a positive super-scale to fp16, never to zero, which would erase weights."""
    return np.where(v > 0, _clamp(v, _TINY_HALF, _MAX_HALF), _f(0)).astype(np.float16).astype(np.float32)


@dataclass(frozen=True, slots=True)
class Grid:
    """Parameters of a type: sub-blocks of `width` weights, codes in [lo, hi], integer sub-scales up to `subs`.

    lo = 0: affine, sub-scales and minima in [0, subs]; else symmetric, sub-scales in [-subs, subs). second: the second
    anchor to try for every block. window: radius of the first search for sub-scales.
    """

    width: int
    lo: int
    hi: int
    subs: int
    second: int
    window: int = 2

    @property
    def anchors(self) -> list[int]:
        """Anchors to try: two for every block, then a power of two and others near the largest integer."""
        return [self.subs, self.second, (self.subs + 1) // 2, *range(self.subs - 1, self.subs - 9, -1)]


@dataclass(frozen=True, slots=True)
class _Tile:
    x: F32  # [W, n, S]
    w: F32  # [W, n, S]
    grid: Grid

    @classmethod
    def load(cls, w: F32, importance: F32 | None, grid: Grid) -> _Tile:
        """Load super-blocks [n, 256]; importance is scaled per block to at most 1 and at least 2^-20."""
        x = np.where(np.isnan(w), _f(0), _clamp(w, -_HUGE, _HUGE))
        if importance is None:
            weight = np.ones_like(x)
        else:
            weight = _clamp(importance, 0, 1e30)
            peak = weight.max(axis=1, keepdims=True)
            weight = np.where(peak > 0, np.maximum(weight / peak, _LEAST), _f(1))
        x, weight = (np.ascontiguousarray(a.reshape(len(a), -1, grid.width).transpose(2, 0, 1)) for a in (x, weight))
        return cls(x, weight, grid)

    def take(self, blocks: NDArray[np.bool_]) -> _Tile:
        return _Tile(self.x[:, blocks], self.w[:, blocks], self.grid)

    def code(self, inverse: F32, minimum: F32) -> F32:
        return _nearest((self.x + minimum) * inverse, self.grid.lo, self.grid.hi)

    def error(self, scale: F32, minimum: F32) -> F32:
        """Return the weighted squared error of each sub-block with nearest codes."""
        e = (self.x + minimum) - scale * self.code(_inverse(scale), minimum)
        return _total(self.w * (e * e))

    def sums(self, inverse: F32, minimum: F32) -> tuple[F32, F32, F32]:
        """Return the weighted sums of q, q^2 and x*q of each sub-block."""
        q = self.code(inverse, minimum)
        wq = self.w * q
        return _total(wq), _total(wq * q), _total(wq * self.x)

    def nearly_exact(self, error: F32) -> NDArray[np.bool_]:
        e, energy = _over_block(error), _over_block(_total(self.w * self.x * self.x))
        return np.asarray((e > 0) & (e < _EXACT * energy))[:, 0]


def _keep(best: _State | None, at: _State) -> _State:
    """Keep the state of lower total error, block by block; the earlier one if equal."""
    if best is None:
        return at
    better = _over_block(at[-1]) < _over_block(best[-1])
    return tuple(np.where(better, a, b) for a, b in zip(at, best, strict=True))


# ---------------------------------------------------------------- w = (d * sub) * q - (dmin * submin)


def _orient(x: F32) -> F32:
    """Return -1 for blocks that span less when negated, else 1, [n, 1]."""
    down, up = x.min(axis=0), x.max(axis=0)
    plain, negated = up - np.minimum(down, _f(0)), np.maximum(up, _f(0)) - down
    return np.where(_over_block(negated * negated) < _over_block(plain * plain), _f(-1), _f(1))


def _affine_start(t: _Tile) -> _Pair:
    """Return the best real scale and minimum per sub-block [n, S].

    Least squares on the codes of seven starting scales.
    """
    sw, sx = _total(t.w), _total(t.w * t.x)
    lo = np.minimum(t.x.min(axis=0), _f(0))
    extent = t.x.max(axis=0) - lo
    scale, minimum, gain = extent / _f(t.grid.hi), -lo, np.zeros_like(lo)
    for start in _AFFINE_STARTS:
        q, qq, xq = t.sums((_f(t.grid.hi) + start) * _inverse(extent), -lo)
        product = sw * qq
        det = product - q * q
        m1, s1 = (q * xq - qq * sx) * _inverse(det), (sw * xq - sx * q) * _inverse(det)
        m, s = np.where(m1 > 0, m1, _f(0)), np.where(m1 > 0, s1, xq * _inverse(qq))
        g = s * xq - m * sx
        better = (det > _SINGULAR * product) & (g > gain * _MARGIN)
        gain, scale, minimum = np.where(better, g, gain), np.where(better, s, scale), np.where(better, m, minimum)
    return scale, minimum


def _affine_refine(t: _Tile, supers: _Pair, target: _Pair, window: int) -> _State:
    """Choose integers for given super-scales: nearest to the target, then the best in a window by actual error.

    The window of the minimum is centred on the least-squares minimum of each scale, for the current codes.
    """
    (d, dmin), (scale, minimum), subs = supers, target, t.grid.subs
    base = sub = _nearest(scale * _inverse(d), 0, subs)
    submin = _nearest(minimum * _inverse(dmin), 0, subs)
    error = t.error(d * sub, dmin * submin)
    sw, sx, q = _total(t.w), _total(t.w * t.x), t.sums(_inverse(d * sub), dmin * submin)[0]
    for i in range(-window, window + 1):
        s = _clamp(base + _f(i), 0, subs)
        centre = _nearest((((d * s) * q - sx) / sw) * _inverse(dmin), 0, subs)
        for j in (-1, 0, 1):
            m = _clamp(centre + _f(j), 0, subs)
            e = t.error(d * s, dmin * m)
            better = e < error
            error, sub, submin = np.where(better, e, error), np.where(better, s, sub), np.where(better, m, submin)
    return d, dmin, sub, submin, error


def _affine_refit(t: _Tile, at: _State) -> _Pair:
    """Return least-squares super-scales [n, 1] for the integers and their codes, rounded to fp16."""
    d, dmin, sub, submin, _ = at
    q, qq, xq = t.sums(_inverse(d * sub), dmin * submin)
    A, B, C = (
        _over_block((sub * sub) * qq),
        _over_block((sub * submin) * q),
        _over_block((submin * submin) * _total(t.w)),
    )
    X, Y = _over_block(sub * xq), _over_block(submin * _total(t.w * t.x))
    det = A * C - B * B
    regular = det > _SINGULAR * (A * C)
    new_d = np.where(regular, (X * C - B * Y) / det, np.where(A > 0, (X + dmin * B) / A, d))
    return _super_scale(new_d), _super_scale(np.where(regular, (B * X - A * Y) / det, dmin))


def _affine_attempts(t: _Tile, target: _Pair, anchors: Sequence[int], best: _State | None) -> _State:
    """Return the best state over the anchors: super-scales, integers, refitted super-scales, integers again."""
    for anchor in anchors:
        d, dmin = (_super_scale(v.max(axis=1, keepdims=True) / _f(anchor)) for v in target)
        at = _affine_refine(t, (d, dmin), target, t.grid.window)
        best = _keep(best, at)
        best = _keep(best, _affine_refine(t, _affine_refit(t, at), (d * at[2], dmin * at[3]), 1))
    assert best is not None
    return best


@np.errstate(all="ignore")
def affine(w: F32, importance: F32 | None, grid: Grid) -> tuple[F32, F32, U8, U8, U8]:
    """[n, 256] -> d [n, 1], dmin [n, 1], sub-scales [n, S], minima [n, S], codes [n, 256]."""
    t = _Tile.load(w, importance, grid)
    sign = _orient(t.x)
    t.x[...] *= sign
    target = _affine_start(t)
    best = _affine_attempts(t, target, grid.anchors[:2], None)
    more = t.nearly_exact(best[-1])
    if more.any():
        some = tuple(a[more] for a in best)
        some = _affine_attempts(t.take(more), (target[0][more], target[1][more]), grid.anchors[2:], some)
        for a, b in zip(best, some, strict=True):
            a[more] = b
    d, dmin, sub, submin, _ = best
    q = t.code(_inverse(d * sub), dmin * submin)
    return sign * d, sign * dmin, sub.astype(np.uint8), submin.astype(np.uint8), _as_bytes(q)


# ---------------------------------------------------------------- w = (d * sub) * q, q in [-half, half)


def _symmetric_start(t: _Tile) -> F32:
    """Return the best real scale per sub-block [n, S]: least squares on the codes of five signed starting scales.

    The first maps the weight of largest magnitude to the lowest code.
    """
    hi, lo = t.x.max(axis=0), t.x.min(axis=0)
    inverse = _inverse(np.where(hi > -lo, hi, lo))
    scale: F32 = np.zeros_like(hi)
    gain = scale
    for side in (_f(-1), _f(1)):
        for start in _SYMMETRIC_STARTS:
            _, qq, xq = t.sums((side * (_f(-t.grid.lo) + start)) * inverse, _ZERO)
            s = xq * _inverse(qq)
            g = s * xq
            better = g > gain * _MARGIN
            gain, scale = np.where(better, g, gain), np.where(better, s, scale)
    return scale


def _symmetric_refine(t: _Tile, d: F32, scale: F32, window: int) -> _State:
    subs = t.grid.subs
    base = sub = _nearest(scale * _inverse(d), -subs, subs - 1)
    error = t.error(d * sub, _ZERO)
    for k in range(-window, window + 1):
        s = _clamp(base + _f(k), -subs, subs - 1)
        e = t.error(d * s, _ZERO)
        better = e < error
        error, sub = np.where(better, e, error), np.where(better, s, sub)
    return d, sub, error


def _symmetric_attempts(t: _Tile, scale: F32, anchors: Sequence[int], best: _State | None) -> _State:
    """Return the best state over the anchors, like _affine_attempts."""
    peak: F32 = np.take_along_axis(scale, np.abs(scale).argmax(axis=1)[:, None], axis=1)
    for anchor in anchors:
        d = _super_scale(abs(peak) / _f(anchor))
        at = _symmetric_refine(t, np.where(peak > 0, -d, d), scale, t.grid.window)
        best = _keep(best, at)
        d, sub, _ = at
        _, qq, xq = t.sums(_inverse(d * sub), _ZERO)
        A, X = _over_block((sub * sub) * qq), _over_block(sub * xq)
        new_d: F32 = np.where(A > 0, X / A, d)
        new_d = np.where(new_d < 0, -_super_scale(-new_d), _super_scale(new_d))
        best = _keep(best, _symmetric_refine(t, new_d, d * sub, 1))
    assert best is not None
    return best


@np.errstate(all="ignore")
def symmetric(w: F32, importance: F32 | None, grid: Grid) -> tuple[F32, I8, U8]:
    """[n, 256] -> d [n, 1], sub-scales [n, S], codes - grid.lo [n, 256]."""
    t = _Tile.load(w, importance, grid)
    scale = _symmetric_start(t)
    best = _symmetric_attempts(t, scale, grid.anchors[:2], None)
    more = t.nearly_exact(best[-1])
    if more.any():
        some = tuple(a[more] for a in best)
        some = _symmetric_attempts(t.take(more), scale[more], grid.anchors[2:], some)
        for a, b in zip(best, some, strict=True):
            a[more] = b
    d, sub, _ = best
    return d, sub.astype(np.int8), _as_bytes(t.code(_inverse(d * sub), _ZERO) - _f(grid.lo))


def _as_bytes(q: F32) -> U8:
    """[W, n, S] -> uint8 [n, 256]"""
    return q.transpose(1, 2, 0).reshape(q.shape[1], -1).astype(np.uint8)


# ---------------------------------------------------------------- one function a type: what its codec calls

_Q2 = Grid(width=16, lo=0, hi=3, subs=15, second=13)
_Q3 = Grid(width=16, lo=-4, hi=3, subs=32, second=24)
_Q4 = Grid(width=32, lo=0, hi=15, subs=63, second=55)
_Q5 = Grid(width=32, lo=0, hi=31, subs=63, second=55)
_Q6 = Grid(width=16, lo=-32, hi=31, subs=128, second=122, window=6)


def q2_k(w: F32, importance: F32 | None) -> U8:
    """[n, 256] -> [n, 84]"""
    return pack_q2_k(*affine(w, importance, _Q2))


def q3_k(w: F32, importance: F32 | None) -> U8:
    """[n, 256] -> [n, 110]"""
    return pack_q3_k(*symmetric(w, importance, _Q3))


def q4_k(w: F32, importance: F32 | None) -> U8:
    """[n, 256] -> [n, 144]"""
    return pack_q4_k(*affine(w, importance, _Q4))


def q5_k(w: F32, importance: F32 | None) -> U8:
    """[n, 256] -> [n, 176]"""
    return pack_q5_k(*affine(w, importance, _Q5))


def q6_k(w: F32, importance: F32 | None) -> U8:
    """[n, 256] -> [n, 210]"""
    return pack_q6_k(*symmetric(w, importance, _Q6))
