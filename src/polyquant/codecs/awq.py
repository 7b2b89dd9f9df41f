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

from polyquant.codecs.affine_codec import (
    AffineCodec,
    group_count,
    stored_codes,
    stored_table,
    words_of,
)
from polyquant.codecs.arguments import exact_part
from polyquant.codecs.keeping import FLOAT_TYPES, Integers
from polyquant.errors import UnknownNameError
from polyquant.ops import code_streams, grouped, halves
from polyquant.types import F32, I8, U8, Affine, ArraySpec, Parts, Shape

__all__ = ["AWQ", "NAMES", "awq_named"]

NAMES: tuple[str, ...] = ("awq.4.g128", "awq.4.g64", "awq.4")
"""Common names of the family, suggested by errors."""
_INT32 = np.dtype(np.int32)


@dataclass(frozen=True, slots=True)
class AWQ(AffineCodec):
    """AWQ weights. group: columns per scale, 0 for the whole row. dtype: of the scales."""

    group: int = 0
    dtype: str = "f16"

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

    @property
    def integers(self) -> Integers:
        """4-bit codes with a zero point per group."""
        return Integers(4, self.group, self.dtype, "integer")  # type: ignore[arg-type]

    def tables(self, parts: Parts, shape: Shape) -> tuple[F32, F32, None]:
        """Scales, and zero points - 8, [N, G]."""
        specs = self.specs(shape)
        scale = halves.widen(exact_part(parts, "scales", specs["scales"]).T)
        zeros = code_streams.unpack_interleaved(exact_part(parts, "qzeros", specs["qzeros"]), 8)
        return scale, zeros.view(np.int8).astype(np.float32), None

    def codes_of(self, parts: Parts, shape: Shape, rows: slice) -> I8:
        """Signed codes of rows [a, b)."""
        words = exact_part(parts, "qweight", self.specs(shape)["qweight"])
        first, last = rows.start // 8, -(-rows.stop // 8)
        codes = code_streams.unpack_interleaved(words[:, first:last], 8).view(np.int8)
        return codes[rows.start - 8 * first : rows.stop - 8 * first]

    def stream(self, parts: Parts, shape: Shape) -> U8 | None:
        """The codes as rows of nibbles, a copy; None if K is not a multiple of 8."""
        words = exact_part(parts, "qweight", self.specs(shape)["qweight"])
        return None if shape[1] % 8 else grouped.awq_rows(words)

    def pack_rows(self, codes: Affine, start: int, out: dict[str, Any], shape: Shape) -> None:
        """Write rows of codes as columns. Raises CodecError if the scales cannot be held."""
        got = stored_codes(self.name, codes, self.integers, len(out["scales"]))
        rows, words = slice(start, start + len(got.raw)), slice(start // 8, (start + len(got.raw)) // 8)
        code_streams.pack_interleaved(got.raw, out["qweight"][:, words], got.shift)
        code_streams.pack_interleaved(got.zero.astype(np.uint8), out["qzeros"][:, words])
        out["scales"][:, rows] = stored_table(self.name, "scales", got.scale, out["scales"].dtype).T


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
