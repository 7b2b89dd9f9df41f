"""What a decoder layer does between its matrices: numpy references. T tokens, H heads, D numbers a head, all float32.

RMS norm: Zhang & Sennrich 2019. Rotary positions: Su et al. 2021. SwiGLU: Shazeer 2020. Grouped queries: Ainslie et al. 2023.
"""

from __future__ import annotations

import numpy as np

from polyquant.types import F32

__all__ = ["attend", "relu2_gate", "rms_norm", "rotate", "swiglu"]


def rms_norm(x: F32, weight: F32, eps: float) -> F32:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis; x [..., n], weight [n]."""
    mean = np.einsum("...i,...i->...", x, x, dtype=np.float64)[..., None] / x.shape[-1]
    return np.asarray(x * (1.0 / np.sqrt(mean + eps)).astype(np.float32) * weight, np.float32)


def rotate(x: F32, cos: F32, sin: F32, *, interleaved: bool) -> F32:
    """Rotary positions: the first 2R numbers of each head turn, the rest stay. x [T, H, D]; cos, sin [T, R].

    Pairs are (i, i + R), or (2i, 2i + 1) if interleaved.
    """
    r = cos.shape[1]
    a, b = (x[..., 0 : 2 * r : 2], x[..., 1 : 2 * r : 2]) if interleaved else (x[..., :r], x[..., r : 2 * r])
    c, s = cos[:, None], sin[:, None]
    out = x.copy()
    first, second = a * c - b * s, a * s + b * c
    if interleaved:
        out[..., 0 : 2 * r : 2], out[..., 1 : 2 * r : 2] = first, second
    else:
        out[..., :r], out[..., r : 2 * r] = first, second
    return out


def attend(q: F32, keys: F32, values: F32, *, start: int, scale: float, window: int = 0) -> F32:
    """Causal attention of T queries at positions start ... start + T - 1 over all positions up to their own.

    q [T, H, D]; keys, values [start + T, G, D] (head h reads group h * G // H) -> [T, H, D]. window: how many of the last positions a query
    sees, its own among them; 0 for all.
    """
    tokens, heads, size = q.shape
    span, groups = keys.shape[:2]
    at = np.arange(start, start + tokens)[:, None]
    past = np.arange(span)[None, :]
    hidden = past > at if not window else (past > at) | (past <= at - window)  # [T, span]
    grouped = q.reshape(tokens, groups, heads // groups, size)
    scores = np.einsum("tghd,sgd->gths", grouped, keys, optimize=True) * np.float32(scale)
    scores[:, hidden[:, None, :].repeat(heads // groups, 1)] = -np.inf
    scores -= scores.max(-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(-1, keepdims=True)
    return np.ascontiguousarray(np.einsum("gths,sgd->tghd", scores, values, optimize=True)).reshape(q.shape)


def swiglu(gate: F32, up: F32) -> F32:
    """silu(gate) * up, silu(x) = x / (1 + exp(-x))."""
    with np.errstate(over="ignore"):
        return np.asarray(gate / (1 + np.exp(-gate)) * up, np.float32)


def relu2_gate(gate: F32, up: F32) -> F32:
    """max(gate, 0)^2 * up."""
    return np.asarray(np.square(np.maximum(gate, 0)) * up, np.float32)
