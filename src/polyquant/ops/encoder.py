"""Bidirectional attention, over all positions or within a window on both sides."""

from __future__ import annotations

import numpy as np

from polyquant.types import F32

__all__ = ["attend_bidirectional"]

_SCORES = 1 << 24  # elements of a float32 array of scores, 64 MB: limits the queries processed at a time


def attend_bidirectional(q: F32, k: F32, v: F32, *, scale: float, window: int = 0) -> F32:
    """Return softmax(scale q k^T) v for q [T, H, D], k and v [T, G, D] -> [T, H, D]. Head h reads group h * G // H.

    window: positions at most window // 2 away are attended to, on either side; 0 for all.
    """
    tokens, heads, size = q.shape
    groups = k.shape[1]
    near = window // 2 if window else tokens
    keys = np.ascontiguousarray(k.transpose(1, 2, 0))[:, None]  # [G, 1, D, T]
    values = np.ascontiguousarray(v.transpose(1, 0, 2))[:, None]  # [G, 1, T, D]
    queries = (q * np.float32(scale)).reshape(tokens, groups, heads // groups, size).transpose(1, 2, 0, 3)
    out = np.empty((tokens, groups, heads // groups, size), np.float32)
    step = max(1, _SCORES // (heads * min(tokens, 2 * near + 1)))
    for a in range(0, tokens, step):
        b = min(a + step, tokens)
        first, last = max(0, a - near), min(tokens, b + near)
        scores = np.matmul(queries[:, :, a:b], keys[..., first:last])  # [G, H / G, b - a, last - first]
        if window:
            distance = np.abs(np.arange(a, b)[:, None] - np.arange(first, last)[None, :])
            scores[..., distance > near] = -np.inf
        scores -= scores.max(-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(-1, keepdims=True)
        out[a:b] = np.matmul(scores, values[:, :, first:last]).transpose(2, 0, 1, 3)
    return out.reshape(tokens, heads, size)
