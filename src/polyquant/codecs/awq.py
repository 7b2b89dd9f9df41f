"""AWQ checkpoints as AutoAWQ writes them for its matrix-matrix kernel ("gemm"): 4-bit codes packed along N.

    qweight  i32 [K, N / 8]     word j of row k: nibble i (lowest bits first) is q[8 j + (0, 2, 4, 6, 1, 3, 5, 7)[i], k]
    qzeros   i32 [G, N / 8]     zero points in the same order, stored unchanged
    scales   f16 [G, N]

    w[n, k] = (q[n, k] - z[g, n]) * s[g, n]          q, z from 0 to 15; Affine codes subtract 8 from both

Bits per weight: 4 + 20 / group. Names: awq.4.g128   awq.4 (one scale per row)   .bf16 .f32 (dtype of the scales)
Source: github.com/casper-hansen/AutoAWQ (facts).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyquant.codecs.affine_reader import FLOAT_TYPES, AffineReader, group_count, words_of
from polyquant.codecs.arguments import exact_part
from polyquant.errors import UnknownNameError
from polyquant.types import F32, U8, Affine, ArraySpec, Parts, Shape

__all__ = ["AWQ", "NAMES", "awq_named"]

_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
NAMES: tuple[str, ...] = ("awq.4.g128", "awq.4.g64", "awq.4")
"""Common names of the family, suggested by errors."""
_INT32 = np.dtype(np.int32)


@dataclass(frozen=True, slots=True)
class AWQ(AffineReader):
    """AWQ weights. group: columns per scale, 0 for the whole row. dtype: of the scales."""

    group: int = 0
    dtype: str = "f16"

    def __str__(self) -> str:
        return self.name

    @property
    def name(self) -> str:
        """Codec name: the group, and the dtype if it is not the default."""
        return ".".join(
            ["awq.4", *([f"g{self.group}"] if self.group else []), *([self.dtype] if self.dtype != "f16" else [])]
        )

    @property
    def bits(self) -> int:
        """Bits per code."""
        return 4

    def specs(self, shape: Shape) -> dict[str, ArraySpec]:
        """Specs of the parts of a weight [N, K]. Raises CodecError if words or groups do not divide it."""
        groups = group_count(self.name, shape, self.group)
        n, k = shape
        words = words_of(self.name, n, 4)
        return {
            "qweight": ArraySpec((k, words), _INT32),
            "qzeros": ArraySpec((groups, words), _INT32),
            "scales": ArraySpec((groups, n), FLOAT_TYPES[self.dtype]),
        }

    def offsets(self, parts: Parts, shape: Shape) -> F32:
        """Zero points - 8, [N, G]."""
        stored = exact_part(parts, "qzeros", self.specs(shape)["qzeros"])
        return _nibbles(stored).astype(np.float32) - np.float32(8)

    def unpack(self, parts: Parts, shape: Shape) -> Affine:
        """Unpack parts to codes. Raises CodecError if a part does not fit."""
        arrays = {key: exact_part(parts, key, spec) for key, spec in self.specs(shape).items()}
        codes = _nibbles(arrays["qweight"]).view(np.int8) - np.int8(8)  # [N, K]
        return Affine(4, codes, np.ascontiguousarray(arrays["scales"].T, np.float32), self.offsets(parts, shape))


def _nibbles(words: NDArray[Any]) -> U8:
    """int32 [rows, N / 8] -> uint8 [N, rows], with outputs in order and each row's codes contiguous."""
    lanes = np.ascontiguousarray(words.T).view(np.uint32)  # [N / 8, rows]
    out = np.empty((8 * len(lanes), len(words)), np.uint8)
    for i, place in enumerate(_ORDER):
        out[place::8] = lanes >> np.uint32(4 * i) & np.uint32(15)
    return out


@cache
def awq_named(name: str) -> AWQ:
    """Return the codec called `name`, e.g. "awq.4.g128". Raises UnknownNameError."""
    group, dtype = 0, "f16"
    for word in name.split(".")[2:]:
        if word[:1] == "g" and word[1:].isdecimal() and len(word) < 8:
            group = int(word[1:])
        elif word in FLOAT_TYPES:
            dtype = word
    if (codec := AWQ(group, dtype)).name != name:
        raise UnknownNameError("codec", name, NAMES)
    return codec
