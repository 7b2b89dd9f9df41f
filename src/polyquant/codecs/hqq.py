"""HQQ, half-quadratic quantization: unsigned codes with a scale and a fractional zero point per group.

The N K weights, row by row, form a matrix whose rows (axis 1) or columns (axis 0) are the groups:

    axis 1   [N K / g, g]      axis 0   [g, N K / g]

W_q holds its rows in bands: with S rows of packed codes, row r is in the packed row r mod S, in the field r / S of
every byte or word, the HIGHEST field first.

    8 bits  u8  S = rows            4 bits  u8  S = rows / 2         2 bits  u8  S = rows / 4       1 bit  u8  rows / 8
    3 bits  i32 S = rows / 10, rounded up; field 0 is bits 27 to 29, field 9 bits 0 to 2

    scale  [N K / g, 1] or [1, N K / g]      zero  the same shape: a float, not rounded to an integer

    w = (q - zero) * scale

Codes of 5 and 6 bits take bytes, those of 1.58 bits (0, 1, 2) the fields of 2 bits: they are hqq.8 and hqq.2 here. The
library computes in the dtype of the scales and rounds twice; polyquant computes in float32.
Bits per weight: b + 32 / g (3 bits: 3.2 + 32 / g).
Names: hqq.4.g64.axis1   hqq.3.g64.axis0   .bf16 .f32 (dtype of scale and zero)
Source: github.com/mobiusml/hqq, core/bitpack.py and core/quantize.py (facts); golden values by hqq 0.2.8.post1 in
tests/vectors/hub_readonly.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from polyquant.codecs.arguments import exact_part, matrix_of
from polyquant.codecs.keeping import FLOAT_TYPES
from polyquant.codecs.read_only import ReadOnlyBlocks
from polyquant.errors import CodecError, UnknownNameError
from polyquant.types import F32, U8, ArraySpec, Parts, Shape

__all__ = ["FIELDS", "HQQ", "NAMES", "hqq_named"]

FIELDS = {8: 1, 4: 2, 3: 10, 2: 4, 1: 8}
"""Bits per code -> codes per byte, or per word of 32 bits for 3 bits."""
NAMES: tuple[str, ...] = ("hqq.4.g64.axis1", "hqq.8.g64.axis1", "hqq.3.g64.axis1", "hqq.2.g64.axis1", "hqq.4.g64.axis0")
"""Common names of the family, suggested by errors."""
_LARGEST_GROUP = 1 << 30
_CHUNK = 1 << 20  # weights decoded at a time


@dataclass(frozen=True, slots=True)
class HQQ(ReadOnlyBlocks):
    """HQQ weights.

    bits: of a field. group: weights per scale. axis: 1 if groups are contiguous. dtype: of the scales.
    """

    bits: int
    group: int
    axis: int = 1
    dtype: str = "f16"

    @property
    def name(self) -> str:
        """Codec name: bits, group, axis, and the dtype if it is not half precision."""
        return f"hqq.{self.bits}.g{self.group}.axis{self.axis}" + (f".{self.dtype}" if self.dtype != "f16" else "")

    def specs(self, shape: Shape) -> dict[str, ArraySpec]:
        """Specs of the parts of a weight [N, K]. Raises CodecError if groups or bytes do not divide it."""
        lines, columns = self._matrix(shape)
        fields = FIELDS[self.bits]
        if self.bits != 3 and lines % fields:
            raise CodecError(
                f"{self.name} packs {fields} codes per byte", expected=f"a multiple of {fields} rows", found=lines
            )
        table = (lines, 1) if self.axis == 1 else (1, columns)
        return {
            "W_q": ArraySpec((-(-lines // fields), columns), np.dtype(np.int32 if self.bits == 3 else np.uint8)),
            "scale": ArraySpec(table, FLOAT_TYPES[self.dtype]),
            "zero": ArraySpec(table, FLOAT_TYPES[self.dtype]),
        }

    def codes(self, parts: Parts, shape: Shape, lines: slice = slice(None)) -> U8:
        """The codes of some rows of the matrix of groups, uint8. Raises CodecError if a part does not fit."""
        spec = self.specs(shape)["W_q"]
        packed = exact_part(parts, "W_q", spec)
        count, columns = self._matrix(shape)
        band = spec.shape[0]
        start, stop, _ = lines.indices(count)
        out = np.empty((max(0, stop - start), columns), np.uint8)
        at = start
        while at < stop:
            field = at // band
            end = min(stop, (field + 1) * band)
            shift = self.bits * (FIELDS[self.bits] - 1 - field)
            words = packed[at - field * band : end - field * band]
            out[at - start : end - start] = words >> shift & (2**self.bits - 1)
            at = end
        return out

    def dequantize(self, parts: Parts, shape: Shape, *, rows: slice | None = None, out: F32 | None = None) -> F32:
        """Parts to float32 [N, K], or only `rows` of it; the parts are always complete."""
        arrays, start, count, out = self._asked(parts, shape, rows, out)
        k = shape[1]
        flat, columns = out.reshape(-1), self._matrix(shape)[1]
        scale, zero = (np.asarray(arrays[key], np.float32) for key in ("scale", "zero"))
        lines = max(1, _CHUNK // columns)
        last = (start * k + count * k + columns - 1) // columns
        for line in range(start * k // columns, last, lines):
            chosen = slice(line, min(line + lines, last))
            low, high = ((t[chosen] if self.axis == 1 else t) for t in (zero, scale))
            with np.errstate(all="ignore"):
                values = (self.codes(arrays, shape, chosen).astype(np.float32) - low) * high
            begin, end = chosen.start * columns - start * k, chosen.stop * columns - start * k  # in flat
            a, b = max(begin, 0), min(end, count * k)
            flat[a:b] = values.reshape(-1)[a - begin : b - begin]
        return out

    def _matrix(self, shape: Shape) -> tuple[int, int]:
        """Rows and columns of the matrix of groups. Raises CodecError for a non-matrix or if groups do not divide."""
        n, k = matrix_of(self.name, shape)
        if n * k % self.group:
            raise CodecError(
                f"groups of {self.name} do not divide this weight",
                expected=f"N K a multiple of {self.group}",
                found=list(shape),
            )
        groups = n * k // self.group
        return (groups, self.group) if self.axis == 1 else (self.group, groups)


@cache
def hqq_named(name: str) -> HQQ:
    """Return the codec called `name`, e.g. "hqq.4.g64.axis1". Raises UnknownNameError."""
    words = [*name.split("."), "", "", ""][1:5]
    bits = next((b for b in FIELDS if words[0] == str(b)), 0)
    size = words[1].removeprefix("g")
    group = int(size) if size.isascii() and size.isdecimal() and len(size) < 11 else 0
    dtype = words[3] or "f16"
    codec = HQQ(bits, group, int(words[2] == "axis1"), dtype)
    if not (bits and 0 < group <= _LARGEST_GROUP and dtype in FLOAT_TYPES) or codec.name != name:
        raise UnknownNameError("codec", name, NAMES)
    return codec
