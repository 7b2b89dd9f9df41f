"""Base class of the codecs for the affine codes of other tools' checkpoints.

Rows of codes are bit streams of 32-bit little-endian words: code i of a stream of b-bit codes is bits [b i, b i + b),
lowest bits first, even where it crosses a word boundary (3, 5 and 6 bits).

A subclass names its parts (`specs`), reads the small tables (`tables`) and unpacks and packs rows of codes. Layouts
that are transposed or packed along rows cannot be cut by rows in the file: conversions hold their parts whole and take
rows out of them, so only a block of codes is ever unpacked.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from polyquant.codecs.arguments import column_weights, finite, matrix_of, of_form, output, real
from polyquant.codecs.keeping import FLOAT_TYPES, Integers, whole_zeros
from polyquant.codecs.named import NamedCodec
from polyquant.errors import CodecError, UnsupportedError
from polyquant.ops import affine, code_streams, grouped, halves, int8, native
from polyquant.ops.matmul import round_activations
from polyquant.registry import Search
from polyquant.types import F32, U8, Affine, Parts, Rounding, Shape, as_matrix

__all__ = [
    "AffineCodec",
    "Stored",
    "decoded_rows",
    "group_count",
    "grouped_columns",
    "stored_codes",
    "stored_table",
    "unpacked_bits",
    "words_of",
]

_KINDS: dict[int, grouped.Kind] = {2: "2", 3: "3", 4: "4", 5: "5", 6: "6", 8: "8"}
_SEARCH = Search("polyquant.quantizers.grouped:quantize")
_SEARCH_STORED = Search("polyquant.quantizers.grouped:quantize_stored")
_SEARCH_FOR = Search("polyquant.quantizers.grouped_inputs:quantize_for")


@dataclass(frozen=True, slots=True)
class AffineCodec(NamedCodec):
    """A codec for another tool's affine codes. Subclasses define its name, its parts and how they unpack and pack."""

    @property
    def form(self) -> type[Affine]:
        """Affine integer codes."""
        return Affine

    @property
    def writable(self) -> bool:
        """True if codes can be packed."""
        return True

    @property
    @abstractmethod
    def integers(self) -> Integers:
        """The traits that decide which codes are kept."""

    @abstractmethod
    def tables(self, parts: Parts, shape: Shape) -> tuple[F32, F32, F32 | None]:
        """Scales, offsets and biases (None without) of a weight [N, K], float32 [N, G] each; with a group index per
        column [N, K]. Reads only the small parts. Raises CodecError if a part does not fit.
        """

    def group_tables(self, parts: Parts, shape: Shape) -> tuple[F32, F32, F32 | None, NDArray[Any] | None]:
        """As `tables`, but always per group, and the group of each column, int32 [K]: None without a group index."""
        return *self.tables(parts, shape), None

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns at whose multiples parts can be cut into weights of this codec; 0: not at all."""
        traits = self.integers
        return 32, 0 if traits.ordered else math.lcm(32, traits.group or 1)

    @abstractmethod
    def codes_of(self, parts: Parts, shape: Shape, rows: slice) -> NDArray[np.int8]:
        """Signed codes of rows [a, b) of a weight [N, K], int8 [b - a, K]. Raises CodecError if a part does not fit."""

    def pack_rows(self, codes: Affine, start: int, out: dict[str, NDArray[Any]], shape: Shape) -> None:
        """Write the codes of rows [start, start + n) of a weight [N, K] into the parts of the whole weight.

        start and n are multiples of 32, except at the end. Raises CodecError for scales or offsets that the codec
        cannot hold.
        """
        raise UnsupportedError(f"{self.name} is read-only", hint="choose another codec, e.g. w8a16.g128 or q8_0")

    # ------------------------------------------------------------ codes

    def unpack(self, parts: Parts, shape: Shape) -> Affine:
        """Unpack parts to codes; with a group index, a scale and an offset per column.

        Raises CodecError if a part does not fit.
        """
        self.specs(shape)
        return self.unpack_rows(parts, shape, slice(0, as_matrix(shape)[0]))

    def unpack_rows(self, parts: Parts, shape: Shape, rows: slice) -> Affine:
        """Unpack rows [a, b) of complete parts. Raises CodecError if a part does not fit."""
        scale, offset, bias = self.tables(parts, shape)
        codes = self.codes_of(parts, shape, rows)
        return Affine(self.integers.bits, codes, scale[rows], offset[rows], None, None if bias is None else bias[rows])

    def empty(self, shape: Shape) -> dict[str, NDArray[Any]]:
        """Parts of a weight [N, K] for `pack_rows`, all zero."""
        return {part: np.zeros(spec.shape, spec.dtype) for part, spec in self.specs(shape).items()}

    def pack(self, codes: Affine) -> dict[str, NDArray[Any]]:
        """Pack codes [N, K] to parts. Raises CodecError for scales or offsets that the codec cannot hold."""
        of_form(self, codes)
        n, k = codes.codes.shape
        out = self.empty((n, k)) if type(self).pack_rows is not AffineCodec.pack_rows else {}  # else it refuses
        self.pack_rows(codes, 0, out, (n, k))
        return out

    def quantize(self, w: ArrayLike, *, importance: ArrayLike | None = None) -> Affine:
        """Quantize floats [N, K] to the grid with the least squared error; importance [K] weights the columns.

        Raises UnsupportedError if the codec is read-only, CodecError for NaN, infinity and bad arguments.
        """
        if not self.writable:
            raise UnsupportedError(f"{self.name} is read-only", hint="choose another codec, e.g. w8a16.g128 or q8_0")
        floats = real(self.name, w)
        _, k = matrix_of(self.name, floats.shape)
        if not k:
            raise CodecError(f"{self.name} needs at least one column", found=list(floats.shape))
        self.specs(floats.shape)
        weights = column_weights(importance, k)
        codes: Affine = _SEARCH(self.integers, finite(self.name, floats), weights)
        return codes

    def quantize_stored(
        self,
        source: str,
        stored: NDArray[Any],
        shape: Shape,
        *,
        importance: F32 | None = None,
        measure: bool = True,
    ) -> tuple[dict[str, NDArray[Any]], tuple[float, ...]] | None:
        """Rows [rows, K] of the codec `source` to parts, in cache, and their error sums (zeros without `measure`).

        None without native kernels for `source`, for codecs that are read-only or have one scale per tensor, and for
        rows with NaN or infinity. Raises CodecError for a shape or importance that does not fit.
        """
        if not self.writable:
            return None
        n, k = matrix_of(self.name, shape)
        self.specs(shape)
        data = np.ascontiguousarray(stored).reshape(-1).view(np.uint8)
        found = _SEARCH_STORED(self.integers, source, data, (n, k), column_weights(importance, k), measure=measure)
        return None if found is None else (self.pack(found[0]), found[1])

    def quantize_for(self, w: F32, hessian: F32 | None) -> Affine:
        """Quantize w [N, K] with the least error on the layer's inputs; hessian [K, K]: the mean of x x^T.

        Raises UnsupportedError if the codec is read-only, CodecError for NaN, infinity and a Hessian that does not fit.
        """
        if not self.writable:
            raise UnsupportedError(f"{self.name} is read-only", hint="choose another codec, e.g. w8a16.g128 or q8_0")
        self.specs(w.shape)
        codes: Affine = _SEARCH_FOR(self.integers, finite(self.name, w), hessian)
        return codes

    # ------------------------------------------------------------ multiplication

    @property
    def inputs(self) -> int8.Inputs:
        """Quantization of the layer's inputs at run time: none, unless the source tool specifies it."""
        return "floats"

    def stream(self, parts: Parts, shape: Shape) -> U8 | None:
        """Codes of a weight [N, K] as rows of unsigned bit streams, uint8 [N, pitch]: in place, or repacked.

        None if the kernels of ops/grouped.py do not take them. Raises CodecError if a part does not fit.
        """
        return None

    def _streamed(self, shape: Shape) -> bool:
        """True if the product of this shape reads `stream`."""
        traits = self.integers
        kind = _KINDS.get(traits.bits) if type(self).stream is not AffineCodec.stream else None
        return (
            kind is not None
            and self.inputs == "floats"
            and not traits.ordered
            and grouped.runs(kind, shape, traits.group or shape[-1])
        )

    def packed(self, parts: Parts, shape: Shape) -> Any | None:
        """Return a matmul handle (ops/matmul.py) on the stored bits, or on the codes, one byte each.

        None without a native kernel, and where each column has its own scale. Raises CodecError if a part does not fit.
        """
        if not native.available():
            return None
        if self._streamed(shape) and (stream := self.stream(parts, shape)) is not None:
            return grouped.handle(self._grouped(stream, *self.tables(parts, shape), shape))
        codes = self.unpack(parts, shape)
        per_column = codes.scale.shape[1] == shape[1] > 1
        return None if per_column or codes.bias is not None else int8.handle(codes, self.inputs)

    def _grouped(self, stream: U8, scale: F32, offset: F32, bias: F32 | None, shape: Shape) -> grouped.Grouped:
        """Tables as small as the codec stores them: its dtype holds the scales and biases without rounding."""
        traits = self.integers
        dtype, half = FLOAT_TYPES[traits.scale], 2 ** (traits.bits - 1)
        group = shape[1] // scale.shape[1]
        kind, scales = _KINDS[traits.bits], np.ascontiguousarray(scale.astype(dtype))
        if bias is not None:
            return grouped.Grouped(stream, kind, shape, scales, group, bias=np.ascontiguousarray(bias.astype(dtype)))
        zero = None if not offset.any() else np.ascontiguousarray((offset + np.float32(half)).astype(np.uint8))
        return grouped.Grouped(stream, kind, shape, scales, group, zero, common=half)

    def multiply(self, parts: Parts, shape: Shape, x: F32, rounding: Rounding) -> F32:
        """Reference of `packed`: x [T, K] -> [T, N]; rounding "none" leaves inputs unquantized. Raises CodecError."""
        if self._streamed(shape) and self.stream(parts, shape) is not None:
            return np.asarray(round_activations(x, rounding) @ self.dequantize(parts, shape).T, np.float32)
        return int8.multiply(x, self.unpack(parts, shape), "floats" if rounding == "none" else self.inputs)

    def dequantize(self, parts: Parts, shape: Shape, *, rows: slice | None = None, out: F32 | None = None) -> F32:
        """Parts to float32 [N, K], or only `rows` of it; the parts are always complete, unless `row_sliced`."""
        self.specs(shape)
        codes = self.unpack_rows(*self.chosen(parts, shape, rows))
        return decoded_rows(codes, None, output(out, shape if rows is None else codes.codes.shape))

    @property
    def decodes_rows(self) -> bool:
        """True: `dequantize(rows=...)` unpacks only these rows."""
        return True


def decoded_rows(weight: Affine, rows: slice | None = None, out: F32 | None = None) -> F32:
    """Return (codes - offset) * scale [+ bias] for all rows or `rows`, float32 [rows, K], written into `out` if
    given."""
    chosen = slice(None) if rows is None else rows
    codes, scale, offset = weight.codes[chosen], weight.scale[chosen], weight.offset[chosen]
    out = np.empty(codes.shape, np.float32) if out is None else out
    flat = out.reshape(codes.shape)
    affine.decode(
        np.ascontiguousarray(codes),
        np.ascontiguousarray(scale),
        np.ascontiguousarray(offset),
        flat,
        None if weight.bias is None else np.ascontiguousarray(weight.bias[chosen]),
    )
    return out


def group_count(name: str, shape: Shape, group: int) -> int:
    """Return the groups per row; group 0 means the whole row.

    Raises CodecError for a non-matrix or if K is not a multiple of it.
    """
    _, k = matrix_of(name, shape)
    if group and k % group:
        raise CodecError(
            f"groups of {name} do not divide this weight", expected=f"K a multiple of {group}", found=list(shape)
        )
    return k // group if group else 1


def words_of(name: str, count: int, bits: int) -> int:
    """Return the number of 32-bit words for `count` codes. Raises CodecError if the last word would not be full."""
    if count * bits % 32:
        raise CodecError(
            f"{name} packs codes into full 32-bit words", expected=f"a multiple of {32 // bits} codes", found=count
        )
    return count * bits // 32


def unpacked_bits(words: NDArray[Any], bits: int, count: int | None = None, shift: int = 0) -> U8:
    """32-bit words [rows, words] -> codes - shift, uint8 [rows, count]; by default as many as fill the words."""
    stream = np.ascontiguousarray(words.astype("<i4", copy=False)).view(np.uint8)
    return code_streams.unpack(stream, bits, stream.shape[1] * 8 // bits if count is None else count, shift)


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


def stored_table(name: str, what: str, values: F32, dtype: np.dtype[Any]) -> NDArray[Any]:
    """float32 values rounded to `dtype`. Raises CodecError where a value overflows, or vanishes."""
    stored, fits = halves.narrow(values, dtype)
    if not fits:
        raise CodecError(
            f"{what} do not fit {name}",
            expected=f"values that {dtype.name} can hold",
            found=f"{np.abs(values).min():g} to {np.abs(values).max():g}",
            hint="choose a codec with float32 scales, or bf16",
        )
    return stored


@dataclass(frozen=True, slots=True)
class Stored:
    """Codes as a codec stores them.

    raw, shift: uint8 [N, K] and a number to add modulo 256, which gives the unsigned codes. scale: float32 [N, G].
    zero: unsigned zero points, float32 [N, G], 2^(bits - 1) if symmetric; bias: float32 [N, G] for codecs with biases,
    else None. index: the group of each column, or None.
    """

    raw: U8
    shift: int
    scale: F32
    zero: F32
    bias: F32 | None
    index: NDArray[Any] | None = None

    @property
    def codes(self) -> U8:
        """Unsigned codes, uint8 [N, K]."""
        return self.raw + np.uint8(self.shift)


def stored_codes(name: str, codes: Affine, want: Integers, groups: int) -> Stored:
    """Codes as a codec with these traits and `groups` scales per row stores them.

    Raises CodecError for more bits, for larger groups, for offsets and biases that the codec cannot hold, and for a
    group index without a place.
    """
    if codes.bits > want.bits:
        raise CodecError(f"{name} cannot hold wider codes", expected=f"{want.bits} bits", found=codes.bits)
    if codes.index is not None and (not want.ordered or codes.scale.shape[1] != groups):
        raise CodecError(f"{name} cannot hold columns that belong to groups in any order", hint="requantize")
    index = codes.index
    if want.ordered and index is None:
        index = (np.arange(codes.codes.shape[1]) // max(1, codes.codes.shape[1] // groups)).astype(np.int32)
    scale, offset = _repeated(codes.scale, groups), _repeated(codes.offset, groups)
    raw, half = codes.codes.view(np.uint8), 2 ** (want.bits - 1)
    if codes.bias is None:
        zero = offset + np.float32(half)
        if want.zero == "none" and offset.any():
            raise CodecError(
                f"{name} has no zero points", found=f"offsets up to {np.abs(offset).max():g}", hint="requantize"
            )
        return Stored(raw, half, scale, zero, -zero * scale if want.zero == "bias" else None, index)
    counted = 2 ** (codes.bits - 1)  # makes codes count from 0
    bias = _repeated(codes.bias, groups)
    if want.zero == "bias":
        return Stored(raw, counted, scale, np.zeros_like(scale), bias, index)
    zeros = whole_zeros(scale, bias)
    most = 2**want.bits - 1
    if zeros is None or ((zeros < 0) | (zeros > most)).any():
        raise CodecError(
            f"{name} needs zero points, and the biases are not multiples of the scales",
            expected=f"bias = -zero * scale with an integer zero from 0 to {most}",
            hint="requantize",
        )
    if want.zero == "none":
        if (zeros != counted).any():
            raise CodecError(f"{name} has no zero points", found="biases", hint="requantize")
        return Stored(raw, half, scale, np.full_like(scale, half), None, index)
    return Stored(raw, counted, scale, zeros, None, index)


def _repeated(table: F32, groups: int) -> F32:
    """[N, G] -> [N, groups], each value repeated. Raises CodecError if the groups do not divide."""
    times, rest = divmod(groups, table.shape[1])
    if rest:
        raise CodecError(
            "the target has fewer scales than the codes", expected=f"a divisor of {groups} groups", found=table.shape[1]
        )
    return table if times == 1 else np.repeat(table, times, 1)
