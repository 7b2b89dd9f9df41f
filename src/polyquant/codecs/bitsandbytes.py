"""bitsandbytes: 4-bit codes of a table (NF4, FP4), and int8 with a scale per row (LLM.int8).

    4 bits   weight        u8  [N, K / 2]      column 2 j in the HIGH nibble of byte j, 2 j + 1 in the low one
             absmax        f32 [N, K / B]      one per block of B columns

    "flat": the blocks of B run over the ends of rows, so that a block may belong to two rows, and the last may be short
             weight        u8  [(N K + 1) / 2]
             absmax        f32 [N K / B]       rounded up

    "double": the same blocks, whose absmax is quantized again
             absmax        u8  [N K / B]
             nested_absmax     f32 [N K / B / 256]
             nested_quant_map  f32 [256]
             nested_offset     f32 [1]         stored in the JSON of the quant_state
             absmax[i] = nested_quant_map[code[i]] * nested_absmax[i / 256] + nested_offset

    w = table[code] * absmax

    int8     weight  i8  [N, K]      SCB  f32 [N]: the largest |w| of the row
             w = code * SCB * (1 / 127)

The tables are constants of the library, which ignores the copy (quant_map) in the file. NF4: quantiles of the normal
distribution. FP4: sign, 2 bits of exponent, 1 of mantissa, divided by 12; code 1 is 0.0625 / 12.
Bits per weight: 4 + 32 / B; double: 4 + (8 + 32 / 256) / B.
Names: bnb.nf4.b64   bnb.fp4.b64   bnb.nf4.b64.flat   bnb.nf4.b64.double   bnb.int8
Source: github.com/bitsandbytes-foundation/bitsandbytes, functional.py and backends/default/ops.py (facts); golden
values by bitsandbytes 0.50.2 in tests/vectors/hub.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from polyquant.codecs.affine_codec import AffineCodec, group_count
from polyquant.codecs.arguments import exact_part, matrix_of, output
from polyquant.codecs.keeping import Integers
from polyquant.codecs.read_only import ReadOnlyBlocks
from polyquant.errors import UnknownNameError
from polyquant.types import F32, I8, U8, ArraySpec, Parts, Shape

__all__ = [
    "BLOCK_SIZES", "NAMES", "NESTED_BLOCK", "TABLES", "BitsAndBytes4", "BitsAndBytes8", "bitsandbytes_named",
]  # fmt: skip

_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_FP4 = (0, 0.0625, 8, 12, 4, 6, 2, 3, 0, -0.0625, -8, -12, -4, -6, -2, -3)
TABLES: dict[str, F32] = {
    "nf4": np.array(_NF4, np.float32),
    "fp4": np.array(_FP4, np.float32) / np.float32(12),
}
"""4-bit type -> float32 [16], the value of each code."""
BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Sizes that the library makes."""
NESTED_BLOCK = 256
NAMES: tuple[str, ...] = ("bnb.nf4.b64", "bnb.fp4.b64", "bnb.nf4.b64.double", "bnb.fp4.b64.double", "bnb.int8")
"""Common names of the family, suggested by errors."""
_STEP = np.float32(1 / 127)
_BYTE, _FLOAT = np.dtype(np.uint8), np.dtype(np.float32)
_LAYOUTS = ("", "flat", "double")


@dataclass(frozen=True, slots=True)
class BitsAndBytes4(ReadOnlyBlocks):
    """4-bit weights. kind: nf4 or fp4. block: weights per absmax. layout: "", "flat" or "double"."""

    kind: str
    block: int
    layout: str = ""

    @property
    def name(self) -> str:
        """Codec name: table, block size, layout."""
        return f"bnb.{self.kind}.b{self.block}" + (f".{self.layout}" if self.layout else "")

    @property
    def row_sliced(self) -> bool:
        """True if every block belongs to one row."""
        return not self.layout

    def specs(self, shape: Shape) -> dict[str, ArraySpec]:
        """Specs of the parts of a weight [N, K].

        Raises CodecError for a non-matrix, or if blocks do not divide its rows and the layout is not flat or double.
        """
        n, k = matrix_of(self.name, shape)
        if not self.layout:
            blocks = group_count(self.name, shape, self.block)
            return {"weight": ArraySpec((n, k // 2), _BYTE), "absmax": ArraySpec((n, blocks), _FLOAT)}
        count = -(-n * k // self.block)
        weight = ArraySpec((-(-n * k // 2),), _BYTE)
        if self.layout == "flat":
            return {"weight": weight, "absmax": ArraySpec((count,), _FLOAT)}
        return {
            "weight": weight,
            "absmax": ArraySpec((count,), _BYTE),
            "nested_absmax": ArraySpec((-(-count // NESTED_BLOCK),), _FLOAT),
            "nested_quant_map": ArraySpec((256,), _FLOAT),
            "nested_offset": ArraySpec((1,), _FLOAT),
        }

    def dequantize(self, parts: Parts, shape: Shape, *, rows: slice | None = None, out: F32 | None = None) -> F32:
        """Parts to float32 [N, K], or only `rows` of it; the parts are always complete."""
        arrays, start, count, out = self._asked(parts, shape, rows, out)
        k = shape[1]
        if count * k == 0:
            return out
        weight, block = arrays["weight"].reshape(-1), self.block
        first, last = start * k // block, -(-(start + count) * k // block)
        absmax = self._absmax(arrays, first, last)
        codes = weight[first * block // 2 : last * block // 2]
        begin = start * k - first * block
        if begin == 0 and count * k == (last - first) * block:
            self._decode(codes, absmax, out.reshape(-1))
            return out
        whole = np.zeros((last - first) * block, np.float32)
        if len(codes) < (last - first) * block // 2:  # the last block of the weight is short
            codes = np.concatenate([codes, np.zeros((last - first) * block // 2 - len(codes), np.uint8)])
        self._decode(codes, absmax, whole)
        out.reshape(-1)[:] = whole[begin : begin + count * k]
        return out

    def _absmax(self, arrays: Parts, first: int, last: int) -> F32:
        """The absmax of blocks [first, last), float32."""
        stored = arrays["absmax"].reshape(-1)[first:last]
        if self.layout != "double":
            return np.asarray(stored, np.float32)
        nested = arrays["nested_absmax"][np.arange(first, last) // NESTED_BLOCK]
        with np.errstate(all="ignore"):
            return np.asarray(arrays["nested_quant_map"][stored] * nested + arrays["nested_offset"], np.float32)

    def _decode(self, codes: U8, absmax: F32, out: F32) -> None:
        """Write table[code] * absmax to out, float32 [2 len(codes)]."""
        np.take(_pairs(self.kind), codes, out=out.view(np.uint64), mode="clip")
        cells = out.reshape(len(absmax), self.block)
        with np.errstate(all="ignore"):
            np.multiply(cells, absmax[:, None], out=cells)


@cache
def _pairs(kind: str) -> NDArray[np.uint64]:
    """byte -> its two values, as the 8 bytes of two float32: the high nibble first."""
    table, byte = TABLES[kind], np.arange(256)
    return np.stack([table[byte >> 4], table[byte & 15]], 1).view(np.uint64)[:, 0]


@dataclass(frozen=True, slots=True)
class BitsAndBytes8(AffineCodec):
    """LLM.int8 weights: symmetric rows."""

    bits: int = 8
    group: int = 0

    @property
    def name(self) -> str:
        """Codec name."""
        return "bnb.int8"

    @property
    def row_sliced(self) -> bool:
        """True: rows are independent."""
        return True

    @property
    def writable(self) -> bool:
        """False: the library quantizes when it loads a float model."""
        return False

    @property
    def integers(self) -> Integers:
        """Symmetric codes with one scale per row."""
        return Integers(self.bits, 0, "f32")

    def specs(self, shape: Shape) -> dict[str, ArraySpec]:
        """Specs of the parts of a weight [N, K]. Raises CodecError for a non-matrix."""
        n, k = matrix_of(self.name, shape)
        return {"weight": ArraySpec((n, k), np.dtype(np.int8)), "SCB": ArraySpec((n,), _FLOAT)}

    def tables(self, parts: Parts, shape: Shape) -> tuple[F32, F32, None]:
        """Scales SCB / 127 and zero offsets, [N, 1]."""
        largest = exact_part(parts, "SCB", self.specs(shape)["SCB"])
        with np.errstate(all="ignore"):
            scale = np.asarray(largest[:, None] * _STEP, np.float32)
        return scale, np.zeros_like(scale), None

    def codes_of(self, parts: Parts, shape: Shape, rows: slice) -> I8:
        """Signed codes of rows [a, b)."""
        return np.ascontiguousarray(exact_part(parts, "weight", self.specs(shape)["weight"])[rows])

    def dequantize(self, parts: Parts, shape: Shape, *, rows: slice | None = None, out: F32 | None = None) -> F32:
        """Parts to float32 [N, K], or only `rows`: two products, as the library rounds them."""
        arrays = {key: exact_part(parts, key, spec) for key, spec in self.specs(shape).items()}
        chosen = slice(None) if rows is None else rows
        codes, largest = arrays["weight"][chosen], arrays["SCB"][chosen]
        out = output(out, shape if rows is None else codes.shape)
        matrix = out.reshape(codes.shape)
        with np.errstate(all="ignore"):
            np.multiply(codes, largest[:, None], out=matrix)
            np.multiply(matrix, _STEP, out=matrix)
        return out


@cache
def bitsandbytes_named(name: str) -> BitsAndBytes4 | BitsAndBytes8:
    """Return the codec called `name`, e.g. "bnb.nf4.b64.double". Raises UnknownNameError."""
    if name == BitsAndBytes8().name:
        return BitsAndBytes8()
    words = [*name.split("."), "", ""][1:4]
    block = next((b for b in BLOCK_SIZES if words[1] == f"b{b}"), 0)
    codec = BitsAndBytes4(words[0], block, words[2])
    if words[0] not in TABLES or not block or words[2] not in _LAYOUTS or codec.name != name:
        raise UnknownNameError("codec", name, NAMES)
    return codec
