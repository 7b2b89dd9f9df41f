"""Search for IQ4_NL and IQ4_XS: scales of least squared error, weighted by importance.

Starting scales map the largest magnitude of 32 weights to a dozen points near the outer levels, with both signs. Each
start is refined by the least-squares scale of its codes, and the best one is refined again. IQ4_XS then tries five ways
to share one d among 8 scales. ggml weights the squares by w^2 and tries only one sign: its unweighted error is 2 to 4 %
larger.

Byte layout: codecs/ggml_iq.py. The native version does the same operations in the same order, so bytes are equal.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyquant.codecs.ggml_iq import LEVELS, pack_iq4_nl, pack_iq4_xs
from polyquant.types import F32, U8

__all__ = ["iq4_nl", "iq4_xs"]

_BETWEEN = (LEVELS[1:].astype(np.float32) + LEVELS[:-1]) / 2  # [15] a value above the k-th takes a code above k
_STARTS = np.array([-142, -134, -126, -118, -110, -102, 92, 100, 108, 116, 124, 132], np.float32)
_SHARES = np.array([-32, -31, -30, -29, -28], np.float32)  # integers for the largest of 8 scales
_HALF_MAX = np.float32(65504)


def _tree(x: NDArray[Any]) -> NDArray[Any]:
    """Sum [..., 2^k] -> [..., 1] pairwise by halves, in the order of the native version."""
    while (half := x.shape[-1] // 2) > 0:
        x = x[..., :half] + x[..., half:]
    return x


def _inverse(x: F32) -> F32:
    """Return 1 / x, and 0 for 0."""
    return np.where(x != 0, np.float32(1) / np.where(x != 0, x, np.float32(1)), np.float32(0))


def _largest(x: F32) -> F32:
    """Return the first value of largest magnitude with its sign, [n, m] -> [n, 1]."""
    out: F32 = np.take_along_axis(x, np.abs(x).argmax(axis=1)[:, None], axis=1)
    return out


def _fit(y: F32, weight: F32, inverse: F32 | np.float32) -> tuple[F32, F32]:
    """Return the least-squares scale for the codes at `inverse`, and the part of the square sum that it explains.

    [n, 32] -> [n, 1] each
    """
    v = LEVELS.astype(np.float32)[np.searchsorted(_BETWEEN, y * inverse)]
    wv = weight * v
    a, b = _tree(wv * y), _tree(wv * v)
    scale = (a / np.where(b > 0, b, np.float32(1))).astype(np.float32)
    return scale, a * scale


def _best_scales(x: F32, weight: F32) -> F32:
    """Return the best scales, [n, 32] -> [n, 1] float32; 0 for a block of zeros."""
    top = _largest(x)
    y = (x / np.where(top != 0, top, np.float32(1))).astype(np.float32)
    best, most = np.zeros_like(top), np.zeros_like(top)  # [n, 1]
    for start in _STARTS:
        scale, gain = _fit(y, weight, start)
        better = gain > most
        best, most = np.where(better, scale, best), np.where(better, gain, most)
    return _fit(y, weight, _inverse(best))[0] * top


def _to_half(d: F32) -> NDArray[np.float16]:
    """Round to half precision; the largest half instead of infinity."""
    return np.clip(d, -_HALF_MAX, _HALF_MAX).astype(np.float16)


@np.errstate(all="ignore")
def iq4_nl(w: F32, importance: F32 | None) -> U8:
    """[n, 32] -> [n, 18]"""
    d = _to_half(_best_scales(w, np.ones_like(w) if importance is None else importance))
    codes = np.searchsorted(_BETWEEN, w * _inverse(d.astype(np.float32)))
    return pack_iq4_nl(d, codes)


@np.errstate(all="ignore")
def iq4_xs(w: F32, importance: F32 | None) -> U8:
    """[n, 256] -> [n, 136]"""
    x = w.reshape(-1, 8, 32)
    weight = np.ones_like(x) if importance is None else importance.reshape(x.shape)
    scales = _best_scales(x.reshape(-1, 32), weight.reshape(-1, 32)).reshape(-1, 8)
    best, least = np.empty((len(x), 136), np.uint8), np.full(len(x), np.inf)
    for share in _SHARES:
        d = _to_half(_largest(scales) / share)  # [n, 1]
        wide = d.astype(np.float32)
        s = np.fmax(np.fmin(np.rint(scales * _inverse(wide)), np.float32(31)), np.float32(-32))  # [n, 8]
        step = (wide * s)[:, :, None]
        codes = np.searchsorted(_BETWEEN, x * _inverse(step))  # [n, 8, 32]
        off = x.astype(np.float64) - step * LEVELS.astype(np.float32)[codes]
        error = _tree(_tree(weight * off * off)[:, :, 0])[:, 0]  # [n]
        better = (error < least) | (share == _SHARES[0])
        best[better], least[better] = pack_iq4_xs(d, s, codes)[better], error[better]
    return best
