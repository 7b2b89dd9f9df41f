"""GPTQ checkpoints as AutoGPTQ and GPTQModel write them: 2-, 3-, 4- or 8-bit codes packed along K.

    qweight  i32 [K b / 32, N]     column n: q[n, 0..K-1] as a b-bit stream, lowest bits first
    qzeros   i32 [G, N b / 32]     row g: the zero points z of group g; format v1 stores z - 1, v2 stores z
    scales   f16 [G, N]
    g_idx    i32 [K]               group of each column; trivial unless quantized with activation order ("act")

    w[n, k] = (q[n, k] - z[g(k), n]) * s[g(k), n]          q, z from 0 to 2^b - 1

Affine codes subtract 2^(b - 1) from both. v1 subtracts 1 from all zero points of a word at once (0x11111111 at 4 bits),
so a zero point of 0 borrows from the next; adding the same constant undoes it. At 3 bits each zero point is lowered
separately, modulo 8. Older kernels disagree about a zero point of 0 (16 at 4 bits).
Bits per weight: b + (16 + b) / group.
".sym" means that config.json declares every zero point to be 2^(b - 1); some programs then do not read qzeros.
Names: gptq.4.g128   gptq.8 (one scale per row)   .sym   .v2   .act (with g_idx)   .bf16 .f32 (dtype of the scales)
Source: github.com/AutoGPTQ/AutoGPTQ, github.com/ModelCloud/GPTQModel (facts).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyquant.codecs.affine_codec import (
    AffineCodec,
    group_count,
    grouped_columns,
    stored_codes,
    stored_table,
    unpacked_bits,
    words_of,
)
from polyquant.codecs.arguments import exact_part
from polyquant.codecs.keeping import FLOAT_TYPES, Integers
from polyquant.errors import CodecError, UnknownNameError
from polyquant.ops import code_streams, grouped, halves
from polyquant.types import F32, I8, U8, Affine, ArraySpec, Parts, Shape

__all__ = ["BITS", "GPTQ", "NAMES", "gptq_named"]

BITS = (2, 3, 4, 8)
NAMES: tuple[str, ...] = (
    "gptq.4.g128.sym",
    "gptq.4.g128",
    "gptq.8.g128.sym",
    "gptq.2.g128",
    "gptq.3.g128",
    "gptq.4.g128.v2",
    "gptq.4.g128.act",
)
"""Common names of the family, suggested by errors."""
_INT32 = np.dtype(np.int32)
_ONES = {2: np.uint32(0x55555555), 4: np.uint32(0x11111111), 8: np.uint32(0x01010101)}
"""bits -> a word with 1 in each field; 3-bit fields cross words."""


@dataclass(frozen=True, slots=True)
class GPTQ(AffineCodec):
    """GPTQ weights.

    bits: per code. group: columns per scale, 0 for the whole row. sym: every zero point is 2^(bits - 1). v2: zero
    points are stored unchanged. ordered: a group index per column. dtype: of the scales.
    """

    bits: int
    group: int = 0
    sym: bool = False
    v2: bool = False
    ordered: bool = False
    dtype: str = "f16"

    @property
    def name(self) -> str:
        """Codec name: the bits, and the options that are not the default."""
        flags = {
            f"g{self.group}": self.group, "sym": self.sym, "v2": self.v2, "act": self.ordered,
            self.dtype: self.dtype != "f16",
        }  # fmt: skip
        return ".".join(["gptq", str(self.bits), *(word for word, given in flags.items() if given)])

    def specs(self, shape: Shape) -> dict[str, ArraySpec]:
        """Specs of the parts of a weight [N, K]. Raises CodecError if words or groups do not divide it."""
        groups = group_count(self.name, shape, self.group)
        n, k = shape
        parts = {
            "qweight": ArraySpec((words_of(self.name, k, self.bits), n), _INT32),
            "qzeros": ArraySpec((groups, words_of(self.name, n, self.bits)), _INT32),
            "scales": ArraySpec((groups, n), FLOAT_TYPES[self.dtype]),
        }
        return parts | ({"g_idx": ArraySpec((k,), _INT32)} if self.ordered else {})

    @property
    def writable(self) -> bool:
        """False with a group index, which only the program that chose the order of columns can give."""
        return not self.ordered

    @property
    def integers(self) -> Integers:
        """Codes with a zero point per group, or symmetric ones."""
        zero = "none" if self.sym else "integer"
        return Integers(self.bits, self.group, self.dtype, zero, ordered=self.ordered)  # type: ignore[arg-type]

    def tables(self, parts: Parts, shape: Shape) -> tuple[F32, F32, None]:
        """Scales, and zero points - 2^(b - 1), [N, G], or [N, K] with a group index."""
        scale, offset, _, index = self.group_tables(parts, shape)
        if index is not None:
            scale, offset = (grouped_columns(self.name, table, index) for table in (scale, offset))
        return scale, offset, None

    def group_tables(self, parts: Parts, shape: Shape) -> tuple[F32, F32, None, NDArray[Any] | None]:
        """The same per group [N, G], and the group index. Raises CodecError for a symmetric weight with other zeros."""
        specs, half = self.specs(shape), 2 ** (self.bits - 1)
        scale = halves.widen(exact_part(parts, "scales", specs["scales"]).T)
        stored = exact_part(parts, "qzeros", specs["qzeros"])
        if not self.v2 and self.bits in _ONES:
            stored = stored.view(np.uint32) + _ONES[self.bits]
        zeros = unpacked_bits(stored.view(np.int32), self.bits)  # [G, N]
        if not self.v2 and self.bits not in _ONES:
            zeros = zeros + np.uint8(1) & np.uint8(2**self.bits - 1)
        if self.sym and (zeros != half).any():
            raise CodecError(
                "config.json says that the weights are symmetric, and zero points say otherwise",
                expected=f"zero points {half}",
                found=f"{zeros.min()} to {zeros.max()}",
                hint='set "sym": false in its quantization_config',
            )
        offset: F32 = np.ascontiguousarray((zeros.astype(np.int16) - half).T, np.float32)
        return scale, offset, None, exact_part(parts, "g_idx", specs["g_idx"]) if self.ordered else None

    def codes_of(self, parts: Parts, shape: Shape, rows: slice) -> I8:
        """Signed codes of rows [a, b): columns of qweight."""
        words = exact_part(parts, "qweight", self.specs(shape)["qweight"])[:, rows]
        return code_streams.unpack_columns(words, self.bits, 2 ** (self.bits - 1)).view(np.int8)

    def stream(self, parts: Parts, shape: Shape) -> U8:
        """The columns of qweight as rows, a copy."""
        return grouped.transposed_words(exact_part(parts, "qweight", self.specs(shape)["qweight"]))

    def pack_rows(self, codes: Affine, start: int, out: dict[str, Any], shape: Shape) -> None:
        """Write rows of codes as columns. Raises CodecError if the scales cannot be held."""
        got = stored_codes(self.name, codes, self.integers, len(out["scales"]))
        rows = slice(start, start + len(codes.codes))
        code_streams.pack_columns(got.raw, out["qweight"][:, rows], self.bits, got.shift)
        out["scales"][:, rows] = stored_table(self.name, "scales", got.scale, out["scales"].dtype).T
        zeros = got.zero.T.astype(np.uint8)  # [G, n]
        if not self.v2 and self.bits not in _ONES:
            zeros = zeros - np.uint8(1) & np.uint8(2**self.bits - 1)
        words = code_streams.pack(zeros, self.bits, code_streams.pitch_of(zeros.shape[1], self.bits)).view("<u4")
        if not self.v2 and self.bits in _ONES:
            words = words - _ONES[self.bits]
        first = start * self.bits // 32
        out["qzeros"][:, first : first + words.shape[1]] = words.view("<i4")
        if self.ordered:
            out["g_idx"][:] = got.index


@cache
def gptq_named(name: str) -> GPTQ:
    """Return the codec called `name`, e.g. "gptq.4.g128.v2". Raises UnknownNameError."""
    _, bits, *words = [*name.split("."), ""]
    options = {"group": 0, "sym": "sym" in words, "v2": "v2" in words, "ordered": "act" in words, "dtype": "f16"}
    for word in words:
        if word[:1] == "g" and word[1:].isdecimal() and len(word) < 8:
            options["group"] = int(word[1:])
        elif word in FLOAT_TYPES:
            options["dtype"] = word
    codec = GPTQ(int(bits) if bits in map(str, BITS) else 0, **options)  # type: ignore[arg-type]
    if codec.name != name or not codec.bits:
        raise UnknownNameError("codec", name, NAMES)
    return codec
