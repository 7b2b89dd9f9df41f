"""What codecs share that read the affine codes of other tools' checkpoints: they unpack and dequantize, and write nothing.

Words of 32 bits hold codes from the lowest bits up: code i of a stream of b-bit codes is bits [b i, b i + b), also where it crosses a word (3 bits).
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
"""What a name calls the dtype of scales."""


@dataclass(frozen=True, slots=True)
class AffineReader(ABC):
    """A codec of another tool's affine codes. A subclass says its name, its parts, and how they unpack."""

    def __str__(self) -> str:
        return self.name

    @property
    @abstractmethod
    def name(self) -> str:
        """Everything that the bytes depend on."""

    @property
    def form(self) -> type[Affine]:
        """Whole numbers with scales."""
        return Affine

    @property
    def granule(self) -> tuple[int, int]:
        """Any shape; `specs` refuses what does not divide."""
        return 1, 1

    @property
    def row_sliced(self) -> bool:
        """False: most parts are transposed, packed along the rows, or tables for all rows."""
        return False

    @abstractmethod
    def specs(self, shape: Shape) -> dict[str, ArraySpec]:
        """Sizes of the parts of a weight [N, K]. Raises CodecError for a shape that the packing does not divide."""

    @abstractmethod
    def offsets(self, parts: Parts, shape: Shape) -> F32:
        """Offset of each row and group, [N, G], from the small parts alone."""

    @abstractmethod
    def unpack(self, parts: Parts, shape: Shape) -> Affine:
        """Parts to codes. Raises CodecError if a part does not fit."""

    # ------------------------------------------------------------ what a linear layer computes

    @property
    def inputs(self) -> int8.Inputs:
        """How the inputs of such a layer are rounded when it runs: not at all, unless its tool says so."""
        return "floats"

    def packed(self, parts: Parts, shape: Shape) -> Any | None:
        """A handle for multiplication (ops/matmul.py) on the codes, a byte each in memory; None without a native kernel, and where every column has a
        scale of its own. Raises CodecError."""
        found = self.unpack(parts, shape)
        return None if found.scale.shape[1] == shape[1] > 1 else int8.handle(found, self.inputs)

    def multiply(self, parts: Parts, shape: Shape, x: F32, rounding: str) -> F32:
        """The reference of `packed`: x [T, K] -> [T, N]; rounding "none" leaves the inputs as they are. Raises CodecError."""
        return int8.multiply(x, self.unpack(parts, shape), "floats" if rounding == "none" else self.inputs)

    def quantize(self, w: ArrayLike, *, importance: ArrayLike | None = None) -> Affine:
        """Raises UnsupportedError: its own tool quantizes to it."""
        raise UnsupportedError(
            f"{self.name} is read, not written", hint="choose another codec, e.g. w8a16.g128 or q8_0"
        )

    def pack(self, codes: Affine) -> dict[str, NDArray[Any]]:
        """Raises UnsupportedError: its own tool writes it."""
        raise UnsupportedError(
            f"{self.name} is read, not written", hint="choose another codec, e.g. w8a16.g128 or q8_0"
        )

    def dequantize(self, parts: Parts, shape: Shape, *, rows: slice | None = None, out: F32 | None = None) -> F32:
        """Parts to float32 [N, K]; of `rows` the parts are whole."""
        found = self.unpack(parts, shape)
        return decoded_rows(found, rows, output(out, shape if rows is None else found.codes[rows].shape))


def decoded_rows(found: Affine, rows: slice | None = None, out: F32 | None = None) -> F32:
    """(codes - offset) * scale of all rows or some, float32 [rows, K] or into out."""
    chosen = slice(None) if rows is None else rows
    codes, scale, offset = found.codes[chosen], found.scale[chosen], found.offset[chosen]
    out = np.empty(codes.shape, np.float32) if out is None else out
    affine.decode(
        np.ascontiguousarray(codes),
        np.ascontiguousarray(scale),
        np.ascontiguousarray(offset),
        out.reshape(codes.shape),
    )
    return out


def group_count(name: str, shape: Shape, group: int) -> int:
    """Groups of a row; group 0 is the whole row. Raises CodecError for what is no matrix, and where groups do not divide it."""
    if len(shape) != 2:
        raise CodecError(f"{name} takes matrices", expected="[N, K]", found=list(shape))
    if group and shape[1] % group:
        raise CodecError(f"{name} does not divide this weight", expected=f"K a multiple of {group}", found=list(shape))
    return shape[1] // group if group else 1


def words_of(name: str, count: int, bits: int) -> int:
    """Words of 32 bits that hold `count` codes. Raises CodecError if the last one would not be full."""
    if count * bits % 32:
        raise CodecError(
            f"{name} packs whole words of 32 bits", expected=f"a multiple of {32 // bits} codes", found=count
        )
    return count * bits // 32


def unpacked_bits(words: NDArray[Any], bits: int) -> U8:
    """int32 [rows, words] -> the codes of each row's stream, uint8 [rows, words * 32 / bits]."""
    stream = np.ascontiguousarray(words.astype("<i4", copy=False)).view(np.uint8)
    rows = len(stream)
    if 8 % bits == 0:
        codes = np.empty((rows, stream.shape[1], 8 // bits), np.uint8)
        for i in range(8 // bits):
            np.bitwise_and(stream >> np.uint8(bits * i), np.uint8(2**bits - 1), out=codes[:, :, i])
        return codes.reshape(rows, -1)
    triples = stream.reshape(rows, -1, bits).astype(np.uint64)  # eight codes lie in as many bytes as a code has bits
    joined = (triples << (8 * np.arange(bits, dtype=np.uint64))).sum(2, dtype=np.uint64)
    eights = joined[:, :, None] >> (bits * np.arange(8, dtype=np.uint64)) & np.uint64(2**bits - 1)
    return np.asarray(eights.reshape(rows, -1), np.uint8)


def grouped_columns(name: str, table: F32, index: NDArray[Any]) -> F32:
    """Scales or offsets [N, G] with the group of each column, int32 [K] -> [N, K]. Raises CodecError for a group that is not there."""
    if index.size and not 0 <= int(index.min()) <= int(index.max()) < table.shape[1]:
        raise CodecError(
            f"{name} names groups that are not there",
            expected=f"0 to {table.shape[1] - 1}",
            found=f"{index.min()} to {index.max()}",
        )
    return np.ascontiguousarray(table[:, index])
