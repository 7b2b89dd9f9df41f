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
Names: gptq.4.g128   gptq.8 (one scale per row)   .v2   .act (with g_idx)   .bf16 .f32 (dtype of the scales)
Source: github.com/AutoGPTQ/AutoGPTQ, github.com/ModelCloud/GPTQModel (facts).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from polyquant.codecs.affine_reader import (
    FLOAT_TYPES,
    AffineReader,
    group_count,
    grouped_columns,
    unpacked_bits,
    words_of,
)
from polyquant.codecs.arguments import exact_part
from polyquant.errors import UnknownNameError
from polyquant.types import F32, Affine, ArraySpec, Parts, Shape

__all__ = ["BITS", "GPTQ", "NAMES", "gptq_named"]

BITS = (2, 3, 4, 8)
NAMES: tuple[str, ...] = (
    "gptq.4.g128",
    "gptq.8.g128",
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
class GPTQ(AffineReader):
    """GPTQ weights.

    bits: per code. group: columns per scale, 0 for the whole row. v2: zero points are stored unchanged. ordered: a
    group index per column. dtype: of the scales.
    """

    bits: int
    group: int = 0
    v2: bool = False
    ordered: bool = False
    dtype: str = "f16"

    def __str__(self) -> str:
        return self.name

    @property
    def name(self) -> str:
        """Codec name: the bits, and the options that are not the default."""
        flags = {f"g{self.group}": self.group, "v2": self.v2, "act": self.ordered, self.dtype: self.dtype != "f16"}
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

    def offsets(self, parts: Parts, shape: Shape) -> F32:
        """Zero points - 2^(b - 1), [N, G]."""
        stored = exact_part(parts, "qzeros", self.specs(shape)["qzeros"])
        if not self.v2 and self.bits in _ONES:
            stored = stored.view(np.uint32) + _ONES[self.bits]
        zeros = unpacked_bits(stored.view(np.int32), self.bits).astype(np.int16)  # [G, N]
        if not self.v2 and self.bits not in _ONES:
            zeros = (zeros + 1) & (2**self.bits - 1)
        return np.ascontiguousarray((zeros - 2 ** (self.bits - 1)).T, np.float32)

    def unpack(self, parts: Parts, shape: Shape) -> Affine:
        """Unpack parts to codes; with g_idx, a scale and an offset per column.

        Raises CodecError if a part does not fit.
        """
        arrays = {key: exact_part(parts, key, spec) for key, spec in self.specs(shape).items()}
        stored = unpacked_bits(arrays["qweight"].T, self.bits)  # [N, K]
        codes = (stored - np.uint8(2 ** (self.bits - 1))).view(np.int8)
        scale: F32 = np.ascontiguousarray(arrays["scales"].T, np.float32)  # [N, G]
        offset = self.offsets(parts, shape)
        if self.ordered:
            scale, offset = (grouped_columns(self.name, table, arrays["g_idx"]) for table in (scale, offset))
        return Affine(8 if self.bits == 8 else 4, codes, scale, offset)


@cache
def gptq_named(name: str) -> GPTQ:
    """Return the codec called `name`, e.g. "gptq.4.g128.v2". Raises UnknownNameError."""
    _, bits, *words = [*name.split("."), ""]
    options = {"group": 0, "v2": "v2" in words, "ordered": "act" in words, "dtype": "f16"}
    for word in words:
        if word[:1] == "g" and word[1:].isdecimal() and len(word) < 8:
            options["group"] = int(word[1:])
        elif word in FLOAT_TYPES:
            options["dtype"] = word
    codec = GPTQ(int(bits) if bits in map(str, BITS) else 0, **options)  # type: ignore[arg-type]
    if codec.name != name or not codec.bits:
        raise UnknownNameError("codec", name, NAMES)
    return codec
