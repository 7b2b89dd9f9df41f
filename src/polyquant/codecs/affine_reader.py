"""Base class of read-only codecs for the affine codes of other tools' checkpoints.

32-bit words hold codes from the lowest bit up: code i of a stream of b-bit codes is bits [b i, b i + b), even where it
crosses a word boundary (3 bits).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike, NDArray

from polyquant.codecs.arguments import output
from polyquant.errors import CodecError, UnsupportedError
from polyquant.ops import affine, int8
from polyquant.types import F32, U8, Affine, ArraySpec, Parts, Shape

__all__ = ["FLOAT_TYPES", "AffineReader", "decoded_rows", "group_count", "grouped_columns", "unpacked_bits", "words_of"]

FLOAT_TYPES: dict[str, np.dtype[Any]] = {
    "f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16), "f32": np.dtype(np.float32),
}  # fmt: skip
"""Scale dtype in a codec's name -> numpy dtype."""


@dataclass(frozen=True, slots=True)
class AffineReader(ABC):
    """A codec for another tool's affine codes. Subclasses define its name, its parts and how they unpack."""

    def __str__(self) -> str:
        return self.name

    @property
    @abstractmethod
    def name(self) -> str:
        """Codec name; includes every option that affects the bytes."""

    @property
    def form(self) -> type[Affine]:
        """Affine integer codes."""
        return Affine

    @property
    def granule(self) -> tuple[int, int]:
        """Any shape; `specs` rejects shapes that do not divide."""
        return 1, 1

    @property
    def row_sliced(self) -> bool:
        """False: most parts are transposed, packed along the rows, or tables for all rows."""
        return False

    @abstractmethod
    def specs(self, shape: Shape) -> dict[str, ArraySpec]:
        """Specs of the parts of a weight [N, K]. Raises CodecError if the packing does not divide the shape."""

    @abstractmethod
    def offsets(self, parts: Parts, shape: Shape) -> F32:
        """Zero points per row and group, [N, G]; reads only the small parts."""

    @abstractmethod
    def unpack(self, parts: Parts, shape: Shape) -> Affine:
        """Unpack parts to codes. Raises CodecError if a part does not fit."""

    # ------------------------------------------------------------ multiplication

    @property
    def inputs(self) -> int8.Inputs:
        """Quantization of the layer's inputs at run time: none, unless the source tool specifies it."""
        return "floats"

    def packed(self, parts: Parts, shape: Shape) -> Any | None:
        """Return a matmul handle (ops/matmul.py) on the codes, one byte each.

        None without a native kernel, and where each column has its own scale. Raises CodecError if a part does not fit.
        """
        codes = self.unpack(parts, shape)
        return None if codes.scale.shape[1] == shape[1] > 1 else int8.handle(codes, self.inputs)

    def multiply(self, parts: Parts, shape: Shape, x: F32, rounding: str) -> F32:
        """Reference of `packed`: x [T, K] -> [T, N]; rounding "none" leaves inputs unquantized. Raises CodecError."""
        return int8.multiply(x, self.unpack(parts, shape), "floats" if rounding == "none" else self.inputs)

    def quantize(self, w: ArrayLike, *, importance: ArrayLike | None = None) -> Affine:
        """Raises UnsupportedError: this codec is read-only."""
        raise UnsupportedError(f"{self.name} is read-only", hint="choose another codec, e.g. w8a16.g128 or q8_0")

    def pack(self, codes: Affine) -> dict[str, NDArray[Any]]:
        """Raises UnsupportedError: this codec is read-only."""
        raise UnsupportedError(f"{self.name} is read-only", hint="choose another codec, e.g. w8a16.g128 or q8_0")

    def dequantize(self, parts: Parts, shape: Shape, *, rows: slice | None = None, out: F32 | None = None) -> F32:
        """Parts to float32 [N, K], or only `rows` of it; the parts are always complete."""
        codes = self.unpack(parts, shape)
        return decoded_rows(codes, rows, output(out, shape if rows is None else codes.codes[rows].shape))


def decoded_rows(weight: Affine, rows: slice | None = None, out: F32 | None = None) -> F32:
    """Return (codes - offset) * scale for all rows or `rows`, float32 [rows, K], written into `out` if given."""
    chosen = slice(None) if rows is None else rows
    codes, scale, offset = weight.codes[chosen], weight.scale[chosen], weight.offset[chosen]
    out = np.empty(codes.shape, np.float32) if out is None else out
    affine.decode(
        np.ascontiguousarray(codes),
        np.ascontiguousarray(scale),
        np.ascontiguousarray(offset),
        out.reshape(codes.shape),
    )
    return out


def group_count(name: str, shape: Shape, group: int) -> int:
    """Return the groups per row; group 0 means the whole row.

    Raises CodecError for a non-matrix or if K is not a multiple of it.
    """
    if len(shape) != 2:
        raise CodecError(f"{name} needs a matrix", expected="[N, K]", found=list(shape))
    if group and shape[1] % group:
        raise CodecError(
            f"groups of {name} do not divide this weight", expected=f"K a multiple of {group}", found=list(shape)
        )
    return shape[1] // group if group else 1


def words_of(name: str, count: int, bits: int) -> int:
    """Return the number of 32-bit words for `count` codes. Raises CodecError if the last word would not be full."""
    if count * bits % 32:
        raise CodecError(
            f"{name} packs codes into full 32-bit words", expected=f"a multiple of {32 // bits} codes", found=count
        )
    return count * bits // 32


def unpacked_bits(words: NDArray[Any], bits: int) -> U8:
    """int32 [rows, words] -> codes, uint8 [rows, words * 32 / bits]."""
    stream = np.ascontiguousarray(words.astype("<i4", copy=False)).view(np.uint8)
    rows = len(stream)
    if 8 % bits == 0:
        codes = np.empty((rows, stream.shape[1], 8 // bits), np.uint8)
        for i in range(8 // bits):
            np.bitwise_and(stream >> np.uint8(bits * i), np.uint8(2**bits - 1), out=codes[:, :, i])
        return codes.reshape(rows, -1)
    triples = stream.reshape(rows, -1, bits).astype(np.uint64)  # eight b-bit codes occupy b bytes
    joined = (triples << (8 * np.arange(bits, dtype=np.uint64))).sum(2, dtype=np.uint64)
    eights = joined[:, :, None] >> (bits * np.arange(8, dtype=np.uint64)) & np.uint64(2**bits - 1)
    return np.asarray(eights.reshape(rows, -1), np.uint8)


def grouped_columns(name: str, table: F32, index: NDArray[Any]) -> F32:
    """Expand scales or offsets [N, G] by a group index per column, int32 [K], to [N, K].

    Raises CodecError for an index out of range.
    """
    if index.size and not 0 <= int(index.min()) <= int(index.max()) < table.shape[1]:
        raise CodecError(
            f"{name} has group indices out of range",
            expected=f"0 to {table.shape[1] - 1}",
            found=f"{index.min()} to {index.max()}",
        )
    return np.ascontiguousarray(table[:, index])
