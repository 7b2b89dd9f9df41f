"""ggml's search for Q4_0, Q4_1, Q5_0 and Q5_1 with an importance vector, bit-exact with its C code.

Blocks of 32 weights; errors are weighted by importance * sqrt(mean square of the row + w^2). Native version:
native/codecs/weighted_search.hpp. Byte layout: codecs/ggml_legacy.py. Source: ggml-quants.c of llama.cpp 0c1e570.
"""

from __future__ import annotations

import numpy as np

from polyquant.codecs.ggml_legacy import fields_of, first_min
from polyquant.ops.rounding import clamp, sequential_sum, to_half
from polyquant.types import F32, U8

__all__ = ["affine", "symmetric"]


def _blocks_of_rows(w: F32, importance: F32) -> tuple[F32, F32]:
    """Return blocks [n, 32] of rows [rows, K] and their error weights, importance * sqrt(row mean square + x^2)."""
    square = sequential_sum(w * w) / np.float32(w.shape[1])  # [rows, 1]
    return w.reshape(-1, 32), (importance * np.sqrt(square + w * w)).reshape(-1, 32)


def symmetric(rows: F32, importance: F32, *, fifth: bool) -> U8:
    """Quantize rows [rows, K] to blocks [n, 18 or 22].

    importance: [K]. Tries 19 scales around extreme / -n and keeps the fit of least weighted error.
    """
    n = 16 if fifth else 8
    x, w = _blocks_of_rows(rows, importance)
    extreme = np.take_along_axis(x, np.abs(x).argmax(axis=1)[:, None], axis=1)
    pick = scale = best = np.zeros_like(extreme)
    for shift in (0, *range(-9, 0), *range(1, 10)):
        trial = -(np.float32(n) + np.float32(0.1) * np.float32(shift)) / extreme
        q = clamp(np.rint(trial * x), -n, n - 1)
        xl, ll = sequential_sum(w * x * q), sequential_sum(w * q * q)
        better = (ll > 0) & (xl * xl > best * ll) if shift else np.ones_like(ll, bool)
        fit = np.where(ll != 0, xl / ll, np.float32(0))
        pick, scale = np.where(better, trial, pick), np.where(better, fit, scale)
        best = np.where(better, fit * xl, best)
    zero = np.abs(extreme) < np.float32(1e-15)
    q = np.where(zero, np.float32(0), clamp(np.rint(pick * x), -n, n - 1) + np.float32(n))
    return np.concatenate([to_half(np.where(zero, np.float32(0), scale)), fields_of(q.astype(np.uint8), fifth)], axis=1)


def affine(rows: F32, importance: F32, *, fifth: bool) -> U8:
    """Quantize rows [rows, K] to blocks [n, 20 or 24].

    importance: [K]. Tries 38 steps and keeps the least-squares scale and minimum (at most 0) of least weighted error.
    """
    n = 31 if fifth else 15
    x, w = _blocks_of_rows(rows, importance)
    low, high = first_min(x), x.max(axis=1, keepdims=True)
    low = np.where(low > 0, np.float32(0), low)
    flat = high <= low
    sum_w, sum_x = sequential_sum(w), sequential_sum(w * x)
    step = np.float32(n) / (high - low)
    q, scale = np.rint(clamp(step * (x - low), 0, n)), np.float32(1) / step
    best = sequential_sum(w * np.square(scale * q + low - x))
    for trial in range(37):
        step = (np.float32(-0.9) + np.float32(0.05) * np.float32(trial) + np.float32(n)) / (high - low)
        t = np.rint(clamp(step * (x - low), 0, n))
        sum_l, sum_ll, sum_xl = sequential_sum(w * t), sequential_sum(w * t * t), sequential_sum(w * t * x)
        det = sum_w * sum_ll - sum_l * sum_l
        base = (sum_ll * sum_x - sum_l * sum_xl) / det
        fit = np.where(base > 0, sum_xl / sum_ll, (sum_w * sum_xl - sum_x * sum_l) / det)
        base = np.where(base > 0, np.float32(0), base)
        error = sequential_sum(w * np.square(fit * t + base - x))
        better = (det > 0) & (error < best)
        q, scale, low = np.where(better, t, q), np.where(better, fit, scale), np.where(better, base, low)
        best = np.where(better, error, best)
    q, scale = np.where(flat, np.float32(0), q), np.where(flat, np.float32(0), scale)
    return np.concatenate([to_half(scale), to_half(low), fields_of(q.astype(np.uint8), fifth)], axis=1)
