"""Block factorization of symmetric matrices."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from polyquant.ops import exact
from polyquant.types import F32

__all__ = ["block_ldl"]

F64: TypeAlias = NDArray[np.float64]


def block_ldl(h: F64, block: int) -> tuple[F32, F64]:
    """Return L and D of H = L blockdiag(D) L^T.

    L [K, K] float32 is lower triangular with `block` x `block` identities on its diagonal; D [K] holds the diagonals of
    the middle blocks. From the Cholesky factor C: L_ij = C_ij C_jj^-1, D_j = C_jj C_jj^T. `block` divides K. Raises
    numpy.linalg.LinAlgError if H is not positive definite.
    """
    c = exact.cholesky(h)
    lower = np.zeros(c.shape, np.float32)
    middle = np.empty(len(c))
    for a in range(0, len(c), block):
        b = a + block
        own = c[a:b, a:b]
        lower[a:b, a:b] = np.eye(block, dtype=np.float32)
        lower[b:, a:b] = _divided(c[b:, a:b], own)
        middle[a:b] = np.square(own).sum(1)
    return lower, middle


def _divided(x: F64, lower: F64) -> F64:
    """Return x L^-1, [M, B] and a lower triangular [B, B]: the last column first, subtracting it from the others."""
    columns = np.array(x.T, order="C")
    for j in range(len(columns) - 1, -1, -1):
        columns[j] /= lower[j, j]
        columns[:j] -= lower[j, :j, None] * columns[j]
    return columns.T
