"""The operations of a decoder layer between its matrices: numpy references and their native counterparts, in float32.

RMS norm: Zhang & Sennrich 2019. Layer norm: Ba et al. 2016. ALiBi: Press et al. 2021. Capped scores: Gemma Team 2024.
Sinks: OpenAI 2025, gpt-oss. Rotary positions: Su et al. 2021. SwiGLU: Shazeer 2020. Grouped queries: Ainslie et al.
2023. Activations: ops/activations.py.

Attention reads keys and values from a cache of blocks of 32 positions (T tokens, H heads, G groups, B blocks, head size
D):

    keys    [G, B, D, 32]   channel by channel, so that scores of 32 positions are one row operation
    values  [G, B, 32, D]
    steps   [G, B, 4, D]    int8 only: step and offset of each key channel, then of each value channel
    recent  [G, 2, 32 * D]  int8 only: keys [D, 32] and values [32, D] of the current block, in float32

    float32 and float16 are stored unchanged. int8 (as KIVI's keys, Liu et al. 2024) gives each channel of a full block
    its own grid:

    step = (max - min) / 255    offset = min + 128 step
    code = min(round((x - min) / step), 255) - 128    x = code * step + offset

or, with a given grid (msModelSlim's C8), one step and offset per channel for all blocks, and inputs are rounded to it
immediately:

    code = clamp(round(x / step + offset), -128, 127)    x = (code - offset) * step

A query attends to its own block in float32 and to earlier ones in int8, regardless of how the tokens were batched. A
channel that holds NaN or infinity reads back as NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from polyquant.ops.activations import gated
from polyquant.ops.arithmetic import fast_kernels, matmul, softmax, tanh
from polyquant.ops.native import empty, lib
from polyquant.types import F32, I8

__all__ = [
    "BLOCK",
    "PLAIN",
    "Scores",
    "add",
    "add_bias",
    "attend",
    "attend_int8",
    "concatenated",
    "dequantize_block",
    "layer_norm",
    "on_grid",
    "rms_norm",
    "rotate",
    "swiglu",
]

BLOCK = 32
"""Positions per block of the cache."""
_QUERIES = 64
"""Queries whose scores are computed at a time."""

F16: TypeAlias = NDArray[np.float16]


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """Transformations of attention scores before the softmax, in this order.

    softcap: c tanh(score / c), 0 for none. slopes [H]: slope times (key position - query position) is added. sinks [H]:
    an extra score without a value. chunk: a query attends to positions from the last multiple of it on, 0 for all.
    """

    softcap: float = 0.0
    slopes: F32 | None = None
    sinks: F32 | None = None
    chunk: int = 0


PLAIN = Scores()
"""No transformation."""


def rms_norm(x: F32, weight: F32, eps: float) -> F32:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last axis; x [..., n], weight [n]."""
    if (native := fast_kernels()) is not None:
        out = empty(*x.shape)
        native.rms_norm(x, weight, out, eps)
        return out
    mean = np.square(x, dtype=np.float64).sum(-1, keepdims=True) / x.shape[-1]
    return np.asarray(x * (1.0 / np.sqrt(mean + eps)).astype(np.float32) * weight, np.float32)


def layer_norm(x: F32, weight: F32, bias: F32 | None, eps: float) -> F32:
    """Return (x - mean) / sqrt(variance + eps) * weight + bias over the last axis.

    x [..., n], weight, bias [n]; or weight [H, n] for x [T, H, n].
    """
    if (native := fast_kernels()) is not None:
        out = empty(*x.shape)
        native.layer_norm(x, weight.reshape(-1), bias, out, eps)
        return out
    mean = x.mean(-1, keepdims=True, dtype=np.float64)
    variance = np.square(x - mean).mean(-1, keepdims=True)
    factor = (1.0 / np.sqrt(variance + eps)).astype(np.float32)
    out = np.asarray((x - mean.astype(np.float32)) * factor * weight, np.float32)
    return out if bias is None else np.asarray(out + bias, np.float32)


def rotate(x: F32, cos: F32, sin: F32, *, interleaved: bool) -> F32:
    """Apply rotary positions to the first 2R dimensions of each head. x [T, H, D]; cos, sin [T, R].

    Pairs are (i, i + R), or (2i, 2i + 1) if interleaved.
    """
    if (native := fast_kernels()) is not None:
        out = empty(*x.shape)
        native.rotate(x, cos, sin, out, interleaved)
        return out
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


def swiglu(gate: F32, up: F32) -> F32:
    """Return silu(gate) * up, silu(x) = x / (1 + exp(-x))."""
    return gated("silu", gate, up)


def add(x: F32, y: F32, scale: float = 1.0) -> F32:
    """Return x + scale * y; both of the same shape."""
    if (native := lib()) is not None:
        out = empty(*x.shape)
        native.add(x, y, out, scale)
        return out
    return x + y * np.float32(scale)


def add_bias(y: F32, bias: F32) -> None:
    """Add bias [n] to y [T, n] in place."""
    if (native := lib()) is not None:
        native.add_bias(y, bias)
    else:
        np.add(y, bias, out=y)


def concatenated(*parts: F32) -> F32:
    """Concatenate columns: [n, a], [n, b], ..., with any row stride -> [n, a + b + ...], contiguous."""
    if (native := lib()) is None:
        return np.concatenate(parts, axis=1)
    out, end = empty(len(parts[0]), sum(part.shape[1] for part in parts)), 0
    for part in parts:
        start, end = end, end + part.shape[1]
        native.copy(part, out[:, start:end])
    return out


def attend(
    q: F32,
    k: F32,
    v: F32,
    keys: F32 | F16,
    values: F32 | F16,
    *,
    start: int,
    scale: float,
    window: int = 0,
    scores: Scores = PLAIN,
) -> F32:
    """Store k, v [T, G, D] at positions start ... and attend causally. q [T, H, D] -> [T, H, D].

    Head h reads group h * G // H. keys, values: with room for start + T positions. window: number of last positions
    that a query attends to, including its own; 0 for all.
    """
    if (native := fast_kernels()) is not None:
        out = empty(*q.shape)
        native.attend(
            q, k, v, keys, values, out, start, scale, window, None, None, None, scores.softcap, scores.slopes,
            scores.sinks,
            scores.chunk,
        )  # fmt: skip
        return out
    end = start + len(k)
    at = np.arange(start, end)
    with np.errstate(over="ignore"):
        keys[:, at // BLOCK, :, at % BLOCK] = k
        values[:, at // BLOCK, at % BLOCK] = v.swapaxes(0, 1)
    used = -(-end // BLOCK)
    past = _by_position(keys[:, :used].astype(np.float32), values[:, :used].astype(np.float32))
    return _causal(q, *(x[:end] for x in past), start=start, scale=scale, window=window, how=scores)


def on_grid(x: F32, step: F32, offset: F32) -> F32:
    """Round x [T, ...] to a grid per element of a row: (q - offset) * step, q = clamp(round(x / step + offset), -128,
    127)."""
    if (native := lib()) is not None:
        out = empty(*x.shape)
        native.on_grid(x, step.reshape(-1), offset.reshape(-1), out)
        return out
    s, z = (a.reshape(x.shape[1:]) for a in (step, offset))
    with np.errstate(all="ignore"):
        return np.asarray((np.clip(np.rint(x / s + z), -128, 127) - z) * s, np.float32)


def attend_int8(
    q: F32,
    k: F32,
    v: F32,
    keys: I8,
    values: I8,
    steps: F32,
    recent: F32,
    *,
    start: int,
    scale: float,
    window: int = 0,
    grid: F32 | None = None,
    scores: Scores = PLAIN,
) -> F32:
    """Compute `attend` on an int8 cache.

    recent: the positions of start's block before start; a block that becomes full is quantized. grid: float32 [G, 4,
    D], step and offset of the key and value channels, if known in advance.
    """
    out = empty(*q.shape)
    if (native := fast_kernels()) is not None:
        native.attend(
            q, k, v, keys, values, out, start, scale, window, steps, recent, grid, scores.softcap, scores.slopes,
            scores.sinks,
            scores.chunk,
        )  # fmt: skip
        return out
    groups, _, size, _ = keys.shape
    if grid is not None:
        k, v = on_grid(k, grid[:, 0], grid[:, 1]), on_grid(v, grid[:, 2], grid[:, 3])
    current = recent[:, :1].reshape(groups, 1, size, BLOCK), recent[:, 1:].reshape(groups, 1, BLOCK, size)
    end = start + len(k)
    for block in range(start // BLOCK, -(-end // BLOCK)):
        first, last = max(start, block * BLOCK), min(end, (block + 1) * BLOCK)
        part, at = slice(first - start, last - start), np.arange(first, last) % BLOCK
        current[0][:, 0, :, at] = k[part]
        current[1][:, 0, at] = v[part].swapaxes(0, 1)
        past = dequantize_block(keys[:, :block], values[:, :block], steps[:, :block])
        visible = _by_position(*(np.concatenate([a, b], 1) for a, b in zip(past, current, strict=True)))
        out[part] = _causal(q[part], *(x[:last] for x in visible), start=first, scale=scale, window=window, how=scores)
        if last == (block + 1) * BLOCK:
            if grid is None:
                keys[:, block], steps[:, block, 0], steps[:, block, 1] = _quantize(current[0][:, 0], axis=2)
                values[:, block], steps[:, block, 2], steps[:, block, 3] = _quantize(current[1][:, 0], axis=1)
            else:
                keys[:, block] = _codes(current[0][:, 0], grid[:, 0, :, None], grid[:, 1, :, None])
                values[:, block] = _codes(current[1][:, 0], grid[:, 2, None], grid[:, 3, None])
                steps[:, block] = grid
                steps[:, block, 1::2] *= -grid[:, ::2]
    return out


def dequantize_block(keys: I8, values: I8, steps: F32) -> tuple[F32, F32]:
    """Dequantize int8 blocks [G, B, D, 32], [G, B, 32, D] with steps [G, B, 4, D] -> float32 of the same shapes."""
    return (
        keys * steps[:, :, 0, :, None] + steps[:, :, 1, :, None],
        values * steps[:, :, 2, None, :] + steps[:, :, 3, None, :],
    )


def _quantize(x: F32, *, axis: int) -> tuple[I8, F32, F32]:
    """Return the codes of a full block, and step and offset [G, D] of its channels; `axis`: the axis of its 32
    positions."""
    with np.errstate(all="ignore"):
        low = x.min(axis, keepdims=True)
        step = (x.max(axis, keepdims=True) - low) / np.float32(255)
        step = np.where(np.isfinite(step), step, np.float32(np.nan))
        codes = np.where(step > 0, np.minimum(np.rint((x - low) / step), 255) - 128, -128).astype(np.int8)
    return codes, step.squeeze(axis), (low + np.float32(128) * step).squeeze(axis)


def _codes(x: F32, step: F32, offset: F32) -> I8:
    """Return the codes of a full block that is on the given grid."""
    with np.errstate(all="ignore"):
        return np.asarray(np.nan_to_num(np.clip(np.rint(x / step + offset), -128, 127), nan=0), np.int8)


def _by_position(keys: F32, values: F32) -> tuple[F32, F32]:
    """Reorder blocks [G, B, D, 32], [G, B, 32, D] to [32 B, G, D] each."""
    groups, blocks, size, _ = keys.shape
    shape = blocks * BLOCK, groups, size
    return keys.transpose(1, 3, 0, 2).reshape(shape), values.transpose(1, 2, 0, 3).reshape(shape)


def _causal(q: F32, keys: F32, values: F32, *, start: int, scale: float, window: int, how: Scores) -> F32:
    """Attend causally with q [T, H, D] at positions start ... to keys, values [start + T, G, D] -> [T, H, D]."""
    tokens, heads, size = q.shape
    groups = keys.shape[1]
    each = heads // groups
    queries = q.reshape(tokens, groups, each, size).transpose(1, 0, 2, 3)
    keys, values = keys.transpose(1, 2, 0), values.transpose(1, 0, 2)  # [G, D, S], [G, S, D]
    out = np.empty((tokens, groups, each, size), np.float32)
    for a in range(0, tokens, _QUERIES):
        at = np.arange(start + a, start + min(a + _QUERIES, tokens), dtype=np.int32)
        low = np.maximum(at - window + 1, 0) if window else np.zeros_like(at)
        if how.chunk:
            low = np.maximum(low, at - at % how.chunk)
        first, last = int(low[0]), int(at[-1]) + 1
        shape = groups, len(at), each, last - first
        scores = matmul(queries[:, a : a + len(at)].reshape(groups, -1, size), keys[..., first:last])
        if how.softcap or how.slopes is not None:
            scores, factor = _bent(scores.reshape(shape) * np.float32(scale), at, first, how), 1.0
        else:
            factor = scale
        sinks = None if how.sinks is None else np.tile(how.sinks.reshape(groups, 1, each), (1, len(at), 1)).reshape(-1)
        begin, end = (np.tile(np.repeat(x - np.int32(first), each), groups) for x in (low, at + np.int32(1)))
        weights = softmax(scores.reshape(-1, last - first), begin, end, factor, sinks)
        part = matmul(weights.reshape(groups, -1, last - first), values[:, first:last])
        out[a : a + len(at)] = part.reshape(groups, len(at), each, size).transpose(1, 0, 2, 3)
    return out.reshape(q.shape)


def _bent(scores: F32, at: NDArray[np.int32], first: int, how: Scores) -> F32:
    """Cap and slope scaled scores [G, T, H / G, S] of queries at positions `at` for keys from `first` on."""
    if how.softcap:
        scores = np.float32(how.softcap) * tanh(scores / np.float32(how.softcap))
    if how.slopes is not None:
        distance = np.arange(first, first + scores.shape[-1]) - at[:, None]
        slopes = how.slopes.reshape(scores.shape[0], 1, -1, 1)
        scores = scores + slopes * distance.astype(np.float32)[None, :, None, :]
    return np.asarray(scores, np.float32)
