"""Base class of the codecs for small floats with block scales.

A subclass names its parts (`specs`), reads its tables (`tables`), and unpacks and packs rows of codes. `lines` tells
how parts are cut by rows: a table of blocks has one entry for several rows, the scale of the tensor one for all.
Conversions stream such weights, too: they read the rows of each part that a block of rows needs.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from polyquant.codecs.arguments import column_weights, exact_part, finite, of_form, output, real
from polyquant.codecs.keeping import SmallFloats
from polyquant.codecs.named import NamedCodec
from polyquant.errors import CodecError
from polyquant.ops import small_floats
from polyquant.ops.matmul import round_activations, round_to_bfloat16
from polyquant.registry import Search
from polyquant.types import F32, U8, Parts, Rounding, ScaledFloats, Shape, as_matrix

__all__ = [
    "FloatCodec", "codes_form", "cut", "decoded_floats", "factors", "paired_codes", "scaled_inputs", "single_scalar",
    "stored_scalar", "stored_scales",
]  # fmt: skip

_SEARCH = Search("polyquant.quantizers.small_floats:quantize")


@dataclass(frozen=True, slots=True)
class FloatCodec(NamedCodec):
    """A codec of small floats. Subclasses define its name, its parts and how they unpack and pack."""

    @property
    def form(self) -> type[ScaledFloats]:
        """Small floats with block scales."""
        return ScaledFloats

    @property
    def row_sliced(self) -> bool:
        """True if every part has one entry per row."""
        return all(line == 1 for line in self.lines.values())

    @property
    @abstractmethod
    def floats(self) -> SmallFloats:
        """Traits of the codec, which decide which codes are kept."""

    @property
    @abstractmethod
    def lines(self) -> dict[str, int]:
        """Part -> rows of the weight for one entry of its first axis; 0: one entry for all rows."""

    @property
    def needs_peak(self) -> bool:
        """True if there is a scale of the whole tensor."""
        return bool(self.floats.tensor) or self.floats.block[0] == 0

    @abstractmethod
    def tables(self, parts: Parts, shape: Shape) -> ScaledFloats:
        """Scales of a weight without codes (`codes` is [0, K]). Reads only the small parts. Raises CodecError if a part
        does not fit.
        """

    @abstractmethod
    def codes_of(self, parts: Parts, shape: Shape, rows: slice) -> U8:
        """Codes of rows [a, b) of complete parts, uint8 [b - a, K]. Raises CodecError if a part does not fit."""

    @abstractmethod
    def pack(self, codes: ScaledFloats) -> dict[str, NDArray[Any]]:
        """Pack codes of complete rows to parts. Raises CodecError for codes and scales that the codec cannot hold."""

    # ------------------------------------------------------------ codes

    def unpack(self, parts: Parts, shape: Shape) -> ScaledFloats:
        """Unpack parts to codes. Raises CodecError if a part does not fit."""
        return self.unpack_rows(parts, shape, slice(None))

    def unpack_rows(self, parts: Parts, shape: Shape, rows: slice) -> ScaledFloats:
        """Unpack rows [a, b) of complete parts. Raises CodecError if a part does not fit."""
        self.specs(shape)
        start, stop, _ = rows.indices(max(0, as_matrix(shape)[0]))
        codes = self.codes_of(parts, shape, rows)  # first: the largest part shows a shape that does not fit
        return cut(replace(self.tables(parts, shape), codes=codes), start, stop)

    def unpack_paired(self, parts: Parts, shape: Shape) -> ScaledFloats | None:
        """Codes with two e2m1 in a byte; None for a codec of other floats. Raises CodecError if a part does not fit."""
        return None

    def quantize(self, w: ArrayLike, *, importance: ArrayLike | None = None, peak: float | None = None) -> ScaledFloats:
        """Quantize floats [..., K] to the nearest codes, with the best of the library's scales and their neighbours.

        importance [K] weights the columns. peak: the largest magnitude of the whole weight if these are rows of it.
        Raises CodecError for NaN, infinity and bad arguments.
        """
        floats = real(self.name, w)
        self.specs(floats.shape)
        rows, k = as_matrix(floats.shape)
        weights = column_weights(importance, k)
        codes: ScaledFloats = _SEARCH(self.floats, finite(self.name, floats).reshape(rows, k), weights, peak)
        return codes

    # ------------------------------------------------------------ values

    def dequantize(self, parts: Parts, shape: Shape, *, rows: slice | None = None, out: F32 | None = None) -> F32:
        """Parts to float32 [N, K], or only `rows` of it; the parts are always complete."""
        self.specs(shape)
        codes = self.unpack_rows(*self.chosen(parts, shape, rows))
        return decoded_floats(codes, output(out, shape if rows is None else codes.codes.shape))

    @property
    def decodes_rows(self) -> bool:
        """True: `dequantize(rows=...)` unpacks only these rows."""
        return True

    def multiply(self, parts: Parts, shape: Shape, x: F32, rounding: Rounding) -> F32:
        """Reference of `packed`: x [T, K] -> [T, N]; inputs of 8-bit floats are rounded to bfloat16. Raises
        CodecError.
        """
        seen = (round_activations if self.floats.element == "e2m1" else round_to_bfloat16)(x, rounding)
        return np.asarray(seen @ self.dequantize(parts, shape).T, np.float32)

    def _rows(self, shape: Shape, group: int) -> tuple[int, int]:
        """Rows and K of a weight of any rank. Raises CodecError if K is not a multiple of the group."""
        rows, k = as_matrix(shape)
        if k % group:
            raise CodecError(
                f"groups of {self.name} do not divide this weight",
                expected=f"K a multiple of {group}",
                found=list(shape),
            )
        return rows, k

    def _part(self, parts: Parts, shape: Shape, key: str) -> NDArray[Any]:
        return exact_part(parts, key, self.specs(shape)[key])


def cut(codes: ScaledFloats, start: int, stop: int) -> ScaledFloats:
    """Codes of rows [start, stop) with only the scales that belong to them, counted from `start` modulo the block."""
    high = codes.block[0]
    if codes.tensor is not None and codes.tensor.ndim == 2:
        codes = replace(codes, tensor=codes.tensor[start:stop], inputs=_of_rows(codes.inputs, start, stop))
    if not high or (start == 0 and stop >= len(codes.scale) * high):
        return replace(codes, start=start)
    return replace(codes, scale=codes.scale[start // high : -(-stop // high)], start=start % high)


def _of_rows(scalars: F32 | None, start: int, stop: int) -> F32 | None:
    return None if scalars is None else scalars[start:stop]


def factors(codes: ScaledFloats) -> F32:
    """The scales as float32 [R, C], with that of the tensor: their product or quotient, rounded to float32."""
    bytewise = codes.scale.dtype == np.uint8
    scale: F32 = small_floats.values(codes.kind)[codes.scale] if bytewise else codes.scale
    if codes.tensor is None:
        return scale
    with np.errstate(all="ignore"):
        combined: F32 = scale / codes.tensor if codes.divides else scale * codes.tensor
    return combined


def decoded_floats(codes: ScaledFloats, out: F32 | None = None) -> F32:
    """Values of the codes, float32 [rows, K]."""
    out = np.empty(codes.shape, np.float32) if out is None else out
    single = small_floats.nibbles(codes.codes) if codes.paired else codes.codes
    return small_floats.decode(
        np.ascontiguousarray(single), codes.element, factors(codes), codes.block, out, codes.start
    )


def stored_scales(name: str, codes: ScaledFloats, want: SmallFloats, table: Shape) -> NDArray[Any]:
    """The scales of `codes` as a codec with these traits stores them, [R, C]: bytes, or float32 to be rounded.

    Raises CodecError for another element or larger blocks, and for scales that bytes cannot hold.
    """
    if codes.element != want.element:
        raise CodecError(f"{name} holds {want.element}", found=codes.element, hint="requantize")
    kind = want.scale.removeprefix("u")
    scale = factors(codes) if codes.tensor is not None and not want.tensor else codes.scale
    if scale.dtype == np.uint8 and codes.kind != kind:
        scale = small_floats.values(codes.kind)[scale]
    if scale.dtype != np.uint8 and kind in ("e8m0", "e4m3"):
        scale = _as_bytes(name, scale, kind)
    for axis in (0, 1):
        scale = _repeated(scale, codes, want.block, table[axis], axis)
    return np.ascontiguousarray(scale)


def _as_bytes(name: str, scale: F32, kind: str) -> U8:
    """The bytes of these scales. Raises CodecError if there are none for one of them."""
    table = small_floats.values(kind)
    order = np.argsort(table, kind="stable")  # NaN last
    found: U8 = order[np.minimum(np.searchsorted(table[order], scale), 255)].astype(np.uint8)
    if not (table[found] == scale).all():
        raise CodecError(f"scales do not fit {name}", expected=f"values of {kind}", hint="requantize")
    return found


def _repeated(scale: NDArray[Any], codes: ScaledFloats, want: tuple[int, int], count: int, axis: int) -> NDArray[Any]:
    """Scales along an axis for the blocks of the target, `count` of them. Raises CodecError if they do not divide."""
    have, size, skip = codes.block[axis], want[axis], 0 if axis else codes.start
    if have == size and not skip:
        return scale
    if size and (have == 0 or (have % size == 0 and skip % size == 0)):
        wide = np.repeat(scale, have // size if have else skip // size + count, axis)
        return wide[skip // size :][:count] if axis == 0 else wide[:, :count]
    if scale.shape[axis] == 1 and not size:
        return scale
    raise CodecError(
        "the target has fewer scales than the codes", expected=f"blocks of {want}", found=f"blocks of {codes.block}"
    )


def paired_codes(codes: ScaledFloats) -> U8:
    """The e2m1 codes, two in a byte."""
    return codes.codes if codes.paired else small_floats.pairs(codes.codes)


def codes_form(codec: FloatCodec, codes: object) -> ScaledFloats:
    """The codes, checked. Raises CodecError for another form."""
    of_form(codec, codes)
    assert isinstance(codes, ScaledFloats)
    return codes


def single_scalar(values: F32) -> F32:
    """The scale that all rows [rows, 1] share, float32 [1]. Raises CodecError if there are several."""
    if not len(values):
        return np.ones(1, np.float32)
    if not np.array_equal(values, np.broadcast_to(values[:1], values.shape), equal_nan=True):
        raise CodecError("the target has one scale of the tensor, and these rows have several")
    first: F32 = values[0]
    return first


def scaled_inputs(codes: ScaledFloats, low: float, high: float, largest: float) -> ScaledFloats:
    """The codes with the scale that maps inputs in [low, high] to magnitudes up to `largest`; 1 for inputs that are 0.

    As ModelOpt's and compressed-tensors' calibration: the largest magnitude over `largest`, or its inverse where scales
    divide.
    """
    magnitude = np.float32(max(-low, high, 0.0))
    scale = magnitude / np.float32(largest) if magnitude > 0 else np.float32(1)
    return replace(codes, inputs=np.asarray([1 / scale if codes.divides else scale], np.float32))


def stored_scalar(value: F32 | None, divides: bool, *, dividing: bool) -> F32:
    """A scale of the tensor or of inputs as stored, float32 [1]: the reciprocal if the target applies it the other way
    round. 1 without one. Raises CodecError if the rows have several.
    """
    if value is None:
        return np.ones(1, np.float32)
    if value.ndim == 2:
        value = single_scalar(value)
    with np.errstate(all="ignore"):
        out: F32 = value if divides == dividing else np.float32(1) / value
    return out
