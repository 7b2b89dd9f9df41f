"""Quantization of floats to affine codes in groups, for every codec with the traits of codecs/keeping.py.

    none       w = q * s              q from -2^(b - 1) to 2^(b - 1) - 1
    integer    w = (q - z) * s        with an integer z in the range of the codes
    bias       w = q * s + m          q from 0 to 2^b - 1

The grid of a group is the best of several that clip its range (CLIPS), with biases also of MLX's own, by the squared
error weighted with the columns' importance; then the scale (and m) that least squares gives for the chosen codes, if it
is better. Scales and biases are judged as they are stored. With the inputs of a layer: quantizers/grouped_inputs.py.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from polyquant.codecs.keeping import FLOAT_TYPES, Integers
from polyquant.ops import native
from polyquant.types import F32, I8, U8, Affine

__all__ = ["CLIPS", "limits", "quantize", "quantize_stored", "stored", "summed"]

CLIPS = {
    7: (1.0, 0.9961, 0.98, 0.95),
    5: (1.0, 0.97, 0.94, 0.9, 0.86),
    4: (1.0, 0.95, 0.9, 0.86, 0.81, 0.76),
    2: (1.0, 0.88, 0.8, 0.74, 0.68, 0.62),
}
"""Clip ratios to try, for at least N bits: with few bits clipping pays, with many only the
exact position of the scale matters. Of symmetric codes they shorten the range that ends at the largest positive code.
"""
_CHUNK = 1 << 20
_LANES = 16


class _Grid(NamedTuple):
    """scale, offset, bias: float32 [N, G]; bias is 0 unless the codec has biases."""

    scale: F32
    offset: F32
    bias: F32


def quantize(traits: Integers, w: F32, importance: F32 | None = None) -> Affine:
    """Quantize w [N, K] for a codec with these traits; K is a multiple of its group. importance: [K].

    Codes of NaN and infinity are undefined.
    """
    n, k = w.shape
    if traits.tensor:
        one = quantize(
            replace(traits, tensor=False), w.reshape(1, -1), None if importance is None else np.tile(importance, n)
        )
        scale, offset = (np.repeat(table, n, 0) for table in (one.scale, one.offset))
        return Affine(traits.bits, one.codes.reshape(n, k), scale, offset)
    groups = k // traits.group if traits.group else 1
    if not w.size:
        empty = np.zeros((n, groups), np.float32)
        return _affine(traits, np.zeros((n, k), np.int8), _Grid(empty, empty + limits(traits)[0], empty))
    weights = np.ones(k, np.float32) if importance is None else importance
    step = max(1, _CHUNK // max(1, k))
    codes = np.empty((n, k), np.int8)
    grids = []
    for a in range(0, n, step):
        cells = w[a : a + step].reshape(-1, groups, k // groups)
        grid, codes[a : a + step] = _searched(traits, cells, weights.reshape(groups, -1))
        grids.append(grid)
    return _affine(traits, codes, _Grid(*(np.concatenate(tables) for tables in zip(*grids, strict=True))))


def quantize_stored(
    traits: Integers, source: str, data: U8, shape: tuple[int, int], importance: F32 | None = None, *, measure: bool
) -> tuple[Affine, tuple[float, ...]] | None:
    """`quantize` of the weights [N, K] in the blocks of the codec `source`, without an array of their floats.

    data: uint8, the blocks of all rows. Also returns the sums of ops.metrics.ErrorSums without its count, zeros unless
    `measure`. None without native kernels, for one scale per tensor, and for NaN and infinity.
    """
    lib = native.lib()
    if lib is None or traits.tensor or not math.prod(shape):
        return None
    n, k = shape
    codes = np.empty(shape, np.int8)
    scale, offset, bias = (np.zeros((n, k // traits.group if traits.group else 1), np.float32) for _ in range(3))
    weights = np.ones(k, np.float32) if importance is None else np.ascontiguousarray(importance, np.float32)
    sums = lib.grouped_quantize(
        source, data, weights, codes, scale, offset, bias, traits.bits, traits.zero, traits.scale, _clips(traits),
        measure,
    )  # fmt: skip
    return None if sums is None else (_affine(traits, codes, _Grid(scale, offset, bias)), sums)


def _clips(traits: Integers) -> tuple[float, ...]:
    return next(ratios for bits, ratios in CLIPS.items() if traits.bits >= bits)


def _affine(traits: Integers, codes: I8, grid: _Grid) -> Affine:
    return Affine(traits.bits, codes, grid.scale, grid.offset, bias=grid.bias if traits.zero == "bias" else None)


def limits(traits: Integers) -> tuple[int, int]:
    """The least and the greatest code."""
    half: int = 2 ** (traits.bits - 1)
    return -half, half - 1


def _codes(traits: Integers, cells: F32, grid: _Grid) -> F32:
    """Nearest codes of cells [N, G, g], as floats."""
    scale, offset, bias = (table[:, :, None] for table in grid)
    with np.errstate(all="ignore"):
        q = np.rint((cells - bias) * (np.float32(1) / scale) + offset)
    return np.asarray(np.clip(q, *limits(traits)), np.float32)


def summed(values: F32) -> F32:
    """Sums of [N, G, g] over g, in 16 lanes and then pairwise: the same bits on every machine."""
    n, groups, size = values.shape
    lanes = np.zeros((n, groups, _LANES), np.float32)
    for a in range(0, size, _LANES):
        part = values[:, :, a : a + _LANES]
        lanes[:, :, : part.shape[2]] += part
    while lanes.shape[2] > 1:
        half = lanes.shape[2] // 2
        lanes = lanes[:, :, :half] + lanes[:, :, half:]
    return np.asarray(lanes[:, :, 0])


def _error(traits: Integers, cells: F32, grid: _Grid, weights: F32) -> F32:
    """Weighted squared error per group, [N, G]."""
    scale, offset, bias = (table[:, :, None] for table in grid)
    with np.errstate(all="ignore"):
        difference = (_codes(traits, cells, grid) - offset) * scale + bias - cells
        return summed(difference * difference * weights)


def _searched(traits: Integers, cells: F32, weights: F32) -> tuple[_Grid, I8]:
    """The best grid of each group of cells [N, G, g], and its codes [N, G * g]. weights: [G, g]."""
    n, groups, size = cells.shape
    clips = _clips(traits)
    lib = native.lib()
    if lib is None:
        grid = _search(traits, cells, weights, clips)
        return grid, _codes(traits, cells, grid).astype(np.int8).reshape(n, groups * size)
    codes = np.empty((n, groups * size), np.int8)
    scale, offset, bias = (np.zeros((n, groups), np.float32) for _ in range(3))
    flat = np.ascontiguousarray(cells).reshape(n, groups * size)
    lib.grouped_search(
        flat, np.ascontiguousarray(weights, np.float32).reshape(-1), codes, scale, offset, bias, traits.bits,
        traits.zero, traits.scale, clips,
    )  # fmt: skip
    return _Grid(scale, offset, bias), codes


def _search(traits: Integers, cells: F32, weights: F32, clips: tuple[float, ...]) -> _Grid:
    """Reference of the kernel grouped_search."""
    low, high = limits(traits)
    first = np.inf if traits.zero == "bias" else 0
    top, bottom = cells.max(axis=2, initial=-first), cells.min(axis=2, initial=first)
    best: _Grid | None = None
    least = np.full(top.shape, np.inf, np.float32)
    for ratio in np.array(clips, np.float32).astype(np.float64):
        if traits.zero == "none":
            scale = stored(np.maximum(top, -bottom) * np.float32(ratio / high), traits, 1)
            grid = _Grid(scale, np.zeros_like(scale), np.zeros_like(scale))
        else:
            scale = stored((top - bottom) * np.float32(ratio / (high - low)), traits, 1)
            start = (top + bottom) * np.float32(0.5) - scale * np.float32((high - low) / 2)
            grid = _Grid(scale, *_placed(traits, scale, start))
        best, least = _better(traits, cells, weights, grid, best, least)
    assert best is not None
    if traits.zero == "bias":
        best, least = _better(traits, cells, weights, _of_mlx(traits, top, bottom), best, least)
    fitted = _fitted(traits, cells, weights, best)
    return _better(traits, cells, weights, fitted, best, least)[0]


def _of_mlx(traits: Integers, top: F32, bottom: F32) -> _Grid:
    """MLX's own grid: the end of the range that is farther from 0 is a level, and so is 0.

    Its scale is negative where that end is the largest value. Source: `affine_quantize` of github.com/ml-explore/mlx.
    """
    low, high = limits(traits)
    below = np.abs(bottom) > np.abs(top)
    edge = np.where(below, bottom, top)
    step = np.maximum((top - bottom) / np.float32(high - low), np.float32(1e-7))
    step = np.where(below, step, -step)
    steps = np.rint(edge / step)
    some, one = steps != 0, np.float32(1)
    scale = stored(np.where(some, edge / np.where(some, steps, one), step), traits, 1)
    return _Grid(scale, np.full_like(scale, low), stored(np.where(some, edge, np.float32(0)), traits, 0))


def _placed(traits: Integers, scale: F32, start: F32) -> tuple[F32, F32]:
    """Offset and bias of a grid whose lowest code decodes to about `start`."""
    low, high = limits(traits)
    if traits.zero == "bias":
        return np.full_like(scale, low), stored(start, traits, 0)
    offset = np.clip(np.rint(low - start / scale), low, high).astype(np.float32)
    return offset, np.zeros_like(scale)


def _better(
    traits: Integers, cells: F32, weights: F32, grid: _Grid, best: _Grid | None, least: F32
) -> tuple[_Grid, F32]:
    """The better of two grids, group by group."""
    error = _error(traits, cells, grid, weights)
    if best is None:
        return grid, error
    wins = error < least
    return _Grid(*(np.where(wins, a, b) for a, b in zip(grid, best, strict=True))), np.where(wins, error, least)


def _fitted(traits: Integers, cells: F32, weights: F32, grid: _Grid) -> _Grid:
    """The grid that least squares gives for the codes of `grid`."""
    levels = _codes(traits, cells, grid) - grid.offset[:, :, None]
    qq, qw = (summed(levels * x * weights) for x in (levels, cells))
    with np.errstate(all="ignore"):
        if traits.zero != "bias":
            return grid._replace(scale=stored(qw / qq, traits, 1))
        total, q, w = (summed(x * weights) for x in (np.ones_like(cells), levels, cells))
        scale = stored((total * qw - q * w) / (total * qq - q * q), traits, 1)
        return _Grid(scale, grid.offset, stored((w - scale * q) / total, traits, 0))


def stored(values: NDArray[Any], traits: Integers, instead: float) -> F32:
    """Values as stored; `instead` for NaN, infinity and (if it is not 0) for 0."""
    with np.errstate(all="ignore"):
        out = np.asarray(values, np.float32).astype(FLOAT_TYPES[traits.scale]).astype(np.float32)
    return np.where(np.isfinite(out) & ((out != 0) | (instead == 0)), out, np.float32(instead)).astype(np.float32)
