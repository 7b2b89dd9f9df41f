"""Orthonormal block-diagonal Hadamard rotations: the numpy reference and its native counterpart.

The matrix of size B = 2 ** b is Sylvester's, H[i, j] = (-1) ** popcount(i & j) / sqrt(B): symmetric, its own inverse.
Blocks are consecutive along an axis whose length they divide; size 1 is the identity.
"""

from __future__ import annotations

import numpy as np

from polyquant.ops import native
from polyquant.types import F32

__all__ = ["LARGEST_BLOCK", "block_size", "hadamard", "hadamard_reference"]

LARGEST_BLOCK = 128


def block_size(length: int) -> int:
    """Return the largest power of two up to 128 that divides `length`."""
    return min(LARGEST_BLOCK, length & -length) if length else 1


def hadamard_reference(x: F32, block: int) -> F32:
    """Rotate each block of the last axis of x [..., M]; float32, summed in butterfly order."""
    y = np.asarray(x, np.float32).reshape(-1, block)
    half = 1
    while half < block:
        pairs = y.reshape(-1, block // (2 * half), 2, half)
        y = np.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], 2)
        half *= 2
    return (y.reshape(x.shape) * np.float32(1 / np.sqrt(block))).astype(np.float32)


def hadamard(x: F32, block: int) -> F32:
    """Rotate x [..., M] along its last axis by blocks of a size that divides M; return a new array."""
    if block == 1 or x.size == 0:
        return np.array(x, np.float32)
    lib = native.lib()
    if lib is None:
        return hadamard_reference(x, block)
    out = np.array(x, np.float32, order="C")
    lib.hadamard(out.reshape(-1, x.shape[-1]), block)
    return out
