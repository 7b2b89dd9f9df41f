"""Find the rows of a checkpoint that a set of stored rows came from, by their correlation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from polyquant.analysis.side import Reader, Side
from polyquant.types import F32, as_matrix

__all__ = ["Match", "cosines", "find_rows", "normalized", "transposed_rows"]

_BLOCK = 1 << 20
_TRANSPOSED = 1 << 26
"""Weights of a matrix that is tested for transposition."""


@dataclass(frozen=True, slots=True)
class Match:
    """For each row the row of a tensor that it resembles most, int64 [n], and the cosine of both, float32 [n]."""

    rows: NDArray[np.int64]
    cosine: F32

    def better(self, other: Match) -> NDArray[np.bool_]:
        """Mask of the rows for which this is the better match."""
        return self.cosine > other.cosine


def normalized(x: F32) -> F32:
    """Rows divided by their norm; zero rows stay zero."""
    with np.errstate(invalid="ignore", over="ignore"):
        norm = np.sqrt(np.einsum("nk,nk->n", x, x, dtype=np.float64))[:, None]
        out = np.divide(x, norm, out=np.zeros_like(x), where=norm > 0, casting="unsafe")
    return np.asarray(np.nan_to_num(out, copy=False, posinf=0, neginf=0), np.float32)


def cosines(x: F32, y: F32) -> F32:
    """Cosine of each row of x with the same row of y."""
    return np.asarray(np.einsum("nk,nk->n", normalized(x), normalized(y)), np.float32)


def find_rows(stored: F32, side: Side, columns: NDArray[np.int64], *, among: Sequence[slice] = ()) -> Match:
    """The rows of a tensor, in these columns, that resemble the stored rows [n, columns] most.

    among: the rows that are searched, all by default.
    """
    rows, k = as_matrix(side.shape)
    reader, probe = Reader(side), normalized(stored)
    best, where = np.full(len(stored), -2, np.float32), np.full(len(stored), -1, np.int64)
    every = np.arange(len(stored))
    for part in _blocks(among or (slice(0, rows),), max(1, _BLOCK // max(1, k))):
        like = probe @ normalized(reader.rows(part)[:, columns]).T  # [n, block]
        at = like.argmax(1)
        top = like[every, at]
        where = np.where(top > best, part.start + at, where)
        best = np.maximum(best, top)
    return Match(where, best)


def transposed_rows(stored: F32, side: Side, rows: Sequence[int]) -> F32 | None:
    """Cosines of stored rows with the same columns of each square matrix of a tensor; None if it has none."""
    if len(side.shape) < 2 or side.shape[-1] != side.shape[-2] or side.shape[-1] ** 2 > _TRANSPOSED:
        return None
    n, reader = side.shape[-1], Reader(side)
    out = np.zeros(len(rows), np.float32)
    for matrix in sorted({r // n for r in rows}):
        mine = [i for i, r in enumerate(rows) if r // n == matrix]
        whole = reader.rows(slice(matrix * n, (matrix + 1) * n))
        out[mine] = cosines(stored[mine], np.ascontiguousarray(whole[:, [rows[i] % n for i in mine]].T))
    return out


def _blocks(parts: Sequence[slice], step: int) -> Iterator[slice]:
    for part in parts:
        for start in range(part.start, part.stop, step):
            yield slice(start, min(part.stop, start + step))
