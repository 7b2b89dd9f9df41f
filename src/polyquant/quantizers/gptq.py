"""GPTQ to int8 or int4 codes: a clip search, then rounding with error compensation on calibration data.

H = mean of x x^T + damping * mean(diag) * I = R R^T with R upper triangular, so errors d = W - W' of a row cost the sum
over columns j of (R_jj d_j + sum of d_i R_ij over i < j)^2. Columns are rounded from left to right, each compensating
the errors of those before it. The scale of a group is set when its first column is reached, from the weights updated so
far: the best of several clips of the min-max range by the error weighted with the diagonal of H. Source: Frantar et al.
2023 (arXiv 2210.17323). A Hessian that no damping makes positive definite is ignored; its diagonal still weights the
clip search.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from polyquant.codecs.keeping import FLOAT_TYPES
from polyquant.codecs.msmodelslim import MsModelSlim
from polyquant.errors import CodecError
from polyquant.ops import affine, exact
from polyquant.types import F32, I8, Affine

__all__ = ["CLIPS", "compensation", "quantize_gptq", "searched_grid"]

CLIPS = {8: (1.0, 0.997, 0.994, 0.991, 0.988, 0.985, 0.98, 0.97, 0.95, 0.92), 4: tuple(1 - 0.03 * i for i in range(11))}
"""Clip ratios to try, by bits: with few bits clipping pays; with many only the exact position of the scale matters."""
_DAMPING = (0.01, 0.05, 0.2, 1.0)
_CHUNK = 1 << 22  # weights per step of the clip search
_BLOCK = 128
"""Columns per block: compensated one by one inside it, all at once beyond it."""


def quantize_gptq(codec: MsModelSlim, w: F32, hessian: F32 | None, grid: tuple[F32, F32] | None = None) -> Affine:
    """Quantize a weight [N, K]. Raises CodecError.

    hessian: mean of x x^T over inputs, [K, K]; None: only the clip search. grid: fixed scale and offset [N, 1] instead
    of a search.
    """
    n, k = w.shape
    if hessian is not None and hessian.shape != (k, k):
        raise CodecError("the Hessian does not fit the weight", expected=f"[{k}, {k}]", found=list(hessian.shape))
    codec.specs((n, k))
    diagonal, factor = compensation(hessian, k)
    if factor is None:
        grid = grid or _grid(codec, w, diagonal)
        return Affine(codec.bits, affine.encode(w, *grid, codec.bits, symmetric=not codec.asymmetric), *grid)
    return _compensated(codec, w, diagonal, factor, grid)


def compensation(hessian: F32 | None, k: int) -> tuple[F32, F32 | None]:
    """The weights of the columns, [K], and the factor of the compensation [K, K], None without a usable Hessian."""
    h = None if hessian is None or not _usable(hessian) else np.asarray(hessian, np.float32)
    diagonal = np.ones(k, np.float32) if h is None else np.maximum(np.diag(h), 0)
    return diagonal, None if h is None else _factor(h)


def _usable(h: F32) -> bool:
    """Return True if the Hessian is finite and not zero."""
    return bool(np.isfinite(h).all() and np.trace(h, dtype=np.float64) > 0)


def _factor(h: F32) -> F32 | None:
    """Return N [K, K], strictly upper: column j compensates d_i N_ij, N_ij = R_ij / R_jj.

    None if no damping makes H definite.
    """
    mean = float(np.trace(h, dtype=np.float64)) / len(h)
    for damping in _DAMPING:
        damped = h[::-1, ::-1].astype(np.float64)
        damped[np.diag_indices(len(h))] += damping * mean
        try:
            lower = exact.cholesky(damped)  # of H with rows and columns reversed; R is this factor reversed
        except np.linalg.LinAlgError:
            continue
        lower /= np.diag(lower).copy()
        lower[np.diag_indices(len(h))] = 0
        if np.isfinite(lower).all():
            return np.ascontiguousarray(lower[::-1, ::-1], np.float32)
    return None


def _compensated(codec: MsModelSlim, w: F32, diagonal: F32, factor: F32, grid: tuple[F32, F32] | None) -> Affine:
    """Return the codes of w [N, K], rounding columns from left to right."""
    n, k = w.shape
    group = codec.group or k
    work, codes = w.copy(), np.empty((n, k), np.int8)
    scale, offset = np.empty((n, k // group), np.float32), np.empty((n, k // group), np.float32)
    of_group = replace(codec, group=0, packing="", sums=0, second=False)
    for g in range(k // group):
        part = slice(g * group, (g + 1) * group)
        scales = grid or _grid(of_group, work[:, part], diagonal[part])
        scale[:, g], offset[:, g] = scales[0][:, 0], scales[1][:, 0]
        for a in range(part.start, part.stop, _BLOCK):
            b = min(a + _BLOCK, part.stop)
            own = (scale[:, g], offset[:, g])
            error = _block(codec, w[:, a:b], work[:, a:b], factor[a:b, a:b], own, codes[:, a:b])
            work[:, b:] += exact.product(error, factor[a:b, b:])
    return Affine(codec.bits, codes, scale, offset)


def _block(codec: MsModelSlim, w: F32, work: F32, factor: F32, grid: tuple[F32, F32], codes: I8) -> F32:
    """Round columns of work [N, B] (weights w plus compensation) into codes; return their errors w - w' [N, B]."""
    scale, offset = grid  # [N] each
    high = 2 ** (codec.bits - 1) - 1
    low = -high - 1 if codec.asymmetric else -high
    columns, error = np.ascontiguousarray(work.T), np.ascontiguousarray(w.T)  # contiguous columns, for speed
    for i, column in enumerate(columns):
        q = np.clip(np.rint(column / scale + offset), low, high)
        codes[:, i] = q
        error[i] -= (q - offset) * scale
        columns[i + 1 :] += factor[i, i + 1 :, None] * error[i]
    return error.T


def _grid(codec: MsModelSlim, w: F32, diagonal: F32) -> tuple[F32, F32]:
    """Return searched scale and offset, [N, G]; equal rows for a codec with one scale per tensor."""
    if not codec.tensor:
        return searched_grid(codec, w, diagonal)
    one = searched_grid(replace(codec, tensor=False), w.reshape(1, -1), np.tile(diagonal, len(w)))
    return np.repeat(one[0], len(w), 0), np.repeat(one[1], len(w), 0)


def searched_grid(codec: MsModelSlim, w: F32, diagonal: F32) -> tuple[F32, F32]:
    """Return scale and offset, float32 [N, G], of the best of CLIPS of the min-max range.

    diagonal: [K], weights of the columns.
    """
    step = max(1, _CHUNK // w.shape[1])
    chunks = [_searched_rows(codec, w[a : a + step], diagonal) for a in range(0, len(w), step)]
    return np.concatenate([s for s, _ in chunks]), np.concatenate([z for _, z in chunks])


def _searched_rows(codec: MsModelSlim, w: F32, diagonal: F32) -> tuple[F32, F32]:
    groups = codec.groups(w.shape)
    full = codec.quantize(w)
    best = np.full((len(w), groups), np.inf, np.float32)
    scale, offset = full.scale.copy(), full.offset.copy()
    weights = diagonal.reshape(1, groups, -1)
    out = np.empty(w.shape, np.float32)
    for clip in CLIPS[codec.bits]:
        s = _stored(codec, full.scale * np.float32(clip))
        z = _offset(codec, full, s)
        q = affine.encode(w, s, z, codec.bits, symmetric=not codec.asymmetric)
        off = np.square(affine.decode(q, s, z, out) - w).reshape(len(w), groups, -1)
        error = (off * weights).sum(2)
        better = error < best
        best[better], scale[better], offset[better] = error[better], s[better], z[better]
    return scale, offset


def _stored(codec: MsModelSlim, scale: F32) -> F32:
    """A scale as the file holds it; one that it does not tell from 0 is 1."""
    if codec.dtype == "f32":
        return scale
    rounded: F32 = scale.astype(FLOAT_TYPES[codec.dtype]).astype(np.float32)
    rounded[rounded == 0] = 1
    return rounded


def _offset(codec: MsModelSlim, full: Affine, scale: F32) -> F32:
    """The whole offset of a tightened grid: the same middle."""
    if not codec.asymmetric:
        return full.offset
    high = 2 ** (codec.bits - 1) - 1
    middle = np.float32(-0.5)  # of the codes -high - 1 to high
    at = (middle - full.offset) * full.scale
    return np.asarray(np.clip(np.rint(middle - at / scale), -high - 1, high), np.float32)
