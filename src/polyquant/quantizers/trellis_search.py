"""Search for the codes and scales of a trellis-coded weight that minimise the error under a Hessian.

The error of a layer's output is tr(E^T H E) with E = W^T - U^T [K, N] and H = mean of x x^T [K, K]; without inputs H
is the identity. Two steps:

codes   H = L blockdiag(D) L^T in blocks of 16 inputs. Blocks are encoded from the last to the first, with feedback from
        the errors of later inputs: W_i + sum_{j > i} L_ji^T E_j. The remaining error is sum_i tr(R_i^T D_i R_i), R_i
        the encoder's own error (LDLQ: Chee et al. 2023, arXiv 2307.13304; blocked: QTIP, Tseng et al. 2024, arXiv
        2406.11235).
fit     for fixed codes, the scales, sv and su of least error in turn, each in closed form.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from polyquant.codecs.trellis import Trellis
from polyquant.ops import exact
from polyquant.ops import trellis as ops
from polyquant.ops.hadamard import hadamard
from polyquant.ops.linalg import block_ldl
from polyquant.types import F32, U8, TrellisCodes

__all__ = [
    "Coder", "Components", "Rotation", "best_inputs", "best_outputs", "best_scales", "first_scales", "quantize",
    "search", "with_feedback",
]  # fmt: skip

F64: TypeAlias = NDArray[np.float64]

_DAMPING = 0.025  # fraction of the mean added to each input's importance
_SIDE = 16
_SPAN = 128
"""Inputs per span; feedback from all later inputs is one matrix product per span."""

_STRETCH = {
    15: (1.00, 1.00, 1.05, 1.10, 1.15, 1.28, 1.29, 1.30),
    13: (1.00, 1.02, 1.08, 1.14, 1.18, 1.30, 1.32, 1.40),
    1: (1.00, 1.03, 1.10, 1.15, 1.20, 1.40, 1.50, 1.60),
    0: (1.00, 1.10, 1.35, 1.55, 1.75, 1.95, 2.05, 2.25),
}
"""Smallest window (0: no trellis) -> RMS of the codebook over RMS of the values, for 1 to 8 bits.

Measured: the ratio with the least error on Gaussian values.
"""

_REACH = (0, 0, 0, 0, 1, 1.05, 1.12, 1.12)
"""Fraction of the largest value that the largest codebook value must reach, for 1 to 8 bits.

With many bits, clipping a value costs more than a wider scale.
"""


@dataclass(frozen=True, slots=True)
class Coder:
    """Encoder and decoder of one trellis code. book: the codebook, float32 [2 ** window_bits]."""

    bits: int
    window_bits: int
    tile_order: str
    book: F32

    @property
    def distortion(self) -> float:
        """Approximate mean squared error on unit Gaussian values."""
        return float(1.2 * 0.25**self.bits)

    def scale(self, w: F32) -> F32:
        """Return the best scale [N] for Gaussian columns [K, N]: from their RMS, or with many bits the largest."""
        spread, top = np.sqrt(np.square(self.book, dtype=np.float64).mean()), np.abs(self.book).max()
        stretch = next(s for least, s in _STRETCH.items() if self._slack >= least)[self.bits - 1]
        by_mean = np.sqrt(np.square(w, dtype=np.float64).mean(0)) * (stretch / spread)
        return np.asarray(np.maximum(by_mean, np.abs(w).max(0) * (_REACH[self.bits - 1] / top)), np.float32)

    @property
    def _slack(self) -> int:
        return self.window_bits if self.window_bits > self.bits else 0

    def __call__(self, w: F32) -> tuple[U8, F32]:
        """Encode [K, N]; returns codes [ceil(K / 16), ceil(N / 16), 256] and the decoded values [K, N]."""
        k, n = w.shape
        rows, columns = -(-k // _SIDE), -(-n // _SIDE)
        padded = w
        if (rows * _SIDE, columns * _SIDE) != w.shape:
            padded = np.zeros((rows * _SIDE, columns * _SIDE), np.float32)
            padded[:k, :n] = w
        order = ops.TILE_ORDERS[self.tile_order]
        tiles = padded.reshape(rows, _SIDE, columns, _SIDE).transpose(0, 2, 1, 3).reshape(-1, ops.TILE)
        codes = ops.encode(tiles[:, order], self.bits, self.window_bits, self.book)
        decoded = np.empty(tiles.shape, np.float32)
        decoded[:, order] = ops.decode(codes, self.bits, self.window_bits, self.book)
        back = decoded.reshape(rows, columns, _SIDE, _SIDE).transpose(0, 2, 1, 3).reshape(padded.shape)
        return codes.reshape(rows, columns, ops.TILE), np.ascontiguousarray(back[:k, :n])


@dataclass(frozen=True, slots=True)
class Rotation:
    """Signs (or other factors) su [K], sv [N], and block sizes along K and N: W^T = diag(su) H_K U H_N diag(sv)."""

    su: F32
    sv: F32
    blocks: tuple[int, int]

    def weight(self, w: F32) -> F32:
        """Rotate a weight [N, K] to U [K, N]; su and sv must be signs."""
        rotated = hadamard(w * self.su * self.sv[:, None], self.blocks[0])
        return hadamard(np.ascontiguousarray(rotated.T), self.blocks[1])

    def hessian(self, h: F32) -> F32:
        """Rotate a Hessian [K, K] to H_K diag(su) H diag(su) H_K, which weights errors of U."""
        half = hadamard(h * self.su * self.su[:, None], self.blocks[0])
        return hadamard(np.ascontiguousarray(half.T), self.blocks[0])

    def back(self, rotated: F32) -> F32:
        """Return H_K U H_N, without su and sv, [K, N]."""
        half = hadamard(rotated, self.blocks[1])
        return np.ascontiguousarray(hadamard(np.ascontiguousarray(half.T), self.blocks[0]).T)


@dataclass(frozen=True, slots=True)
class Components:
    """The components of a weight: codes [ceil(K / 16), ceil(N / 16), 256], scales [G, N], su [K], sv [N]."""

    codes: U8
    scales: F32
    su: F32
    sv: F32


def quantize(codec: Trellis, w: F32, *, importance: F32 | None, hessian: F32 | None, book: F32) -> TrellisCodes:
    """Quantize a finite weight [N, K] with the least error; the search of a codec (codecs.trellis.TrellisSearch).

    importance: float32 [K], the Hessian's diagonal if only that is known; 2.5 % of its mean is added. hessian: mean of
    x x^T, [K, K]. book: float32 [2 ** window_bits]. Raises numpy.linalg.LinAlgError for a Hessian that is not positive
    definite.
    """
    n, k = w.shape
    blocks = codec.blocks((n, k))
    if importance is not None and hessian is None and importance.any():
        hessian = np.diag(
            importance + np.float32(_DAMPING) * importance.mean()
        )  # an input that was never active still counts
    rotation = Rotation(_signs(k, blocks[0], 0), _signs(n, blocks[1], 1), blocks)
    coder = Coder(codec.bits, codec.window_bits, codec.tile_order, book)
    result = search(w, hessian, rotation, coder, codec.group_count((n, k)))
    return TrellisCodes(codec.code((n, k)), result.codes, result.scales, result.su, result.sv)


def _signs(length: int, block: int, axis: int) -> F32:
    """Return random signs for a rotated axis, the same for equal lengths; ones for an axis without rotation."""
    if block == 1:
        return np.ones(length, np.float32)
    bits = np.random.Generator(np.random.PCG64([length, axis])).integers(0, 2, length, np.int8)
    return (1 - 2 * bits).astype(np.float32)


def search(w: F32, h: F32 | None, rotation: Rotation, coder: Coder, groups: int) -> Components:
    """Search the codes and scales of a weight [N, K] with Hessian [K, K].

    Raises numpy.linalg.LinAlgError if H is not positive definite.
    """
    rotated = rotation.weight(w)
    scales = first_scales(rotated, groups, coder)
    if h is None:
        codes, numbers = coder(scaled(rotated, scales))
        rotated_hessian = None
    else:
        rotated_hessian = rotation.hessian(h)
        codes, numbers, scales = with_feedback(rotated, rotated_hessian, scales, coder)
    scales = best_scales(rotated, numbers, scales, rotated_hessian)
    target, plain = np.ascontiguousarray(w.T), rotation.back(wide(scales, len(rotated)) * numbers)
    sv = rotation.sv if rotation.blocks[1] == 1 else best_outputs(target, plain * rotation.su[:, None], h)
    # Readers of plain grids swap su and sv in square weights, so both stay ones there.
    simple = rotation.blocks == (1, 1) and coder.window_bits == coder.bits
    su = rotation.su if simple else best_inputs(target, plain * sv, h)
    return Components(codes, scales, su, sv)


def wide(scales: F32, k: int) -> F32:
    """Expand scales [G, N] to every input, [K, N]."""
    return np.repeat(scales, -(-k // len(scales)), 0)[:k]


def first_scales(w: F32, groups: int, coder: Coder) -> F32:
    """Return initial scales [G, N] for values [K, N]."""
    span = -(-len(w) // groups)
    parts = [w[a : a + span] for a in range(0, groups * span, span)]
    return np.stack([coder.scale(part) if len(part) else np.zeros(w.shape[1], np.float32) for part in parts])


def scaled(w: F32, scales: F32) -> F32:
    """Divide [K, N] by its scales [G, N]; zero where the scale is zero."""
    full = wide(scales, len(w))
    return np.divide(w, full, out=np.zeros_like(w), where=full != 0)


def with_feedback(w: F32, h: F32, scales: F32, coder: Coder) -> tuple[U8, F32, F32]:
    """Encode a weight [K, N] with error feedback under its Hessian [K, K] and scales [G, N].

    Returns codes [ceil(K / 16), ceil(N / 16), 256], decoded values [K, N], and the scales used [G, N]. Raises
    numpy.linalg.LinAlgError if H is not positive definite.
    """
    k, n = w.shape
    full = -(-k // _SIDE) * _SIDE
    lower, middle = block_ldl(_padded(h, full), _SIDE)
    scales = scales * np.float32(_growth(lower, middle, coder.distortion))
    target = np.zeros((full, n), np.float32)
    target[:k] = w
    each = np.zeros((full, n), np.float32)
    each[:k] = wide(scales, k)
    error, numbers = np.zeros((full, n), np.float32), np.empty((full, n), np.float32)
    codes = np.empty((full // _SIDE, -(-n // _SIDE), ops.TILE), np.uint8)
    for stop in range(full, 0, -_SPAN):
        start = max(0, stop - _SPAN)
        target[start:stop] += exact.product(lower[stop:, start:stop].T, error[stop:])
        for a in range(stop - _SIDE, start - 1, -_SIDE):
            b = a + _SIDE
            target[a:b] += exact.product(lower[b:stop, a:b].T, error[b:stop])
            own = np.divide(target[a:b], each[a:b], out=np.zeros((_SIDE, n), np.float32), where=each[a:b] != 0)
            codes[a // _SIDE : b // _SIDE], numbers[a:b] = coder(own)
            error[a : min(b, k)] = w[a:b] - (each[a:b] * numbers[a:b])[: k - a]
    return codes, numbers[:k], scales


def _padded(h: F32, size: int) -> F64:
    """Pad [K, K] to float64 [size, size] with independent inputs of mean energy."""
    k = len(h)
    out = np.zeros((size, size))
    out[:k, :k] = h
    out[range(k, size), range(k, size)] = h.trace(dtype=np.float64) / k
    return out


def _growth(lower: F32, middle: F64, distortion: float) -> float:
    """Return the ratio by which error feedback widens the values to encode.

    The root of the mean of v_i = 1 + distortion * sum_{j > i} |L_ji|^2 v_j over blocks i, weighted with the cost tr
    D_i.
    """
    blocks = len(middle) // _SIDE
    power = np.square(lower.reshape(blocks, _SIDE, blocks, _SIDE)).sum((1, 3), dtype=np.float64) / _SIDE
    cost = middle.reshape(blocks, _SIDE).sum(1)
    v = np.ones(blocks)
    for i in range(blocks - 2, -1, -1):
        v[i] += distortion * (power[i + 1 :, i] * v[i + 1 :]).sum()
    return float(np.sqrt(np.average(v, weights=cost)))


# ---------------------------------------------------------------- for codes that stand


def best_scales(w: F32, numbers: F32, scales: F32, h: F32 | None) -> F32:
    """Improve scales [G, N]; optimal if G = 1 or without a Hessian. w, numbers: [K, N]."""
    groups, span = len(scales), -(-len(w) // len(scales))
    out = np.zeros(scales.shape, np.float32)
    if h is not None:
        out[:] = scales
        slope = exact.product(h, w - wide(scales, len(w)) * numbers)
    for g in range(groups):
        rows = slice(g * span, (g + 1) * span)
        u = numbers[rows]
        weighted, remaining = (u, w[rows]) if h is None else (exact.product(h[rows, rows], u), slope[rows])
        step = _ratio(exact.column_dots(u, remaining), exact.column_dots(u, weighted))
        out[g] += step
        if h is not None and groups > 1:
            slope -= exact.product(h[:, rows], u * step)
    return out


def best_outputs(w: F32, u: F32, h: F32 | None) -> F32:
    """Return sv [N] of least error between u sv and w, both [K, N]."""
    weighted = u if h is None else exact.product(h, u)
    return _ratio(exact.column_dots(weighted, w), exact.column_dots(weighted, u))


def best_inputs(w: F32, u: F32, h: F32 | None) -> F32:
    """Return su [K] of least error between su u and w, both [K, N]: the solution of (H o u u^T) su = diag(H w u^T)."""
    if h is None:
        return _ratio(exact.column_dots(u.T, w.T), exact.column_dots(u.T, u.T))
    matrix = np.asarray(h * exact.gram(u.T).astype(np.float64), np.float64)
    return np.asarray(exact.solve(matrix, exact.column_dots(exact.product(h, w).T, u.T)), np.float32)


def _ratio(a: F64, b: F64) -> F32:
    return np.divide(a, b, out=np.zeros_like(a), where=b > 0).astype(np.float32)
