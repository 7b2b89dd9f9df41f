"""Optional capabilities of codecs beyond `types.Codec`: one protocol each, checked with isinstance.

    if isinstance(codec, Packed):
        handle = codec.packed(parts, shape)

A codec has a capability if it has its members, in this package or in another; nothing is registered.
`polyquant.testing.codecs` checks the claimed capabilities. Callers check for a capability and never for a codec's
class, so that a new codec changes no caller.

    runs        Packed, OwnProduct, HoldsBias
    options     Configurable, Tiled, Fitted
    bytes       Swappable, Opaque, CountsSymbols, DecodesRows, Stackable, MaybeIntegers
    searches    FitsInputs, QuantizesStored, MayOnlyRead
    codes       HoldsBlocks, PacksRows, CutsParts, WithBits, Grouped, Ordered, MayFixInputs, ScalesInputs,
                TrellisDialect
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeGuard, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from polyquant.types import F32, Activation, Affine, Codec, Form, Parts, Rounding, Shape

__all__ = [
    "Configurable", "CountsSymbols", "Cut", "CutsParts", "DecodesRows", "Field", "FitsInputs", "Fitted", "Grouped",
    "HoldsAffineCodes", "HoldsBias", "HoldsBlocks", "MayFixInputs", "MayNeedPeak", "MayOnlyRead", "MaybeIntegers",
    "Opaque", "Ordered", "OwnProduct", "Packed", "PacksRows", "QuantizesStored", "ScalesInputs", "Stackable",
    "Swappable", "Tile", "Tiled", "TrellisDialect", "WithBits", "claims",
]  # fmt: skip

Tile: TypeAlias = tuple[int, int, int]
"""(BM, BK, bm) of bitnet.cpp's kernel_config.ini (there: bm, bk, bmm)."""
Field: TypeAlias = tuple[int, int, int]
"""A multi-byte field of a block: (offset, item size, count). Big-endian files store these byte-swapped."""


C = TypeVar("C")
_claimed: dict[tuple[type, type], bool] = {}


def claims(codec: Codec, capability: type[C]) -> TypeGuard[C]:
    """isinstance, cached by class: the check of every member is slow, and plans repeat it for many tensors."""
    key = type(codec), capability
    if key not in _claimed:
        _claimed[key] = isinstance(codec, capability)
    return _claimed[key]


# ---------------------------------------------------------------- multiplication


@runtime_checkable
class Packed(Protocol):
    """Can be multiplied in its stored layout by a native kernel."""

    def packed(self, parts: Parts, shape: Shape) -> Any | None:
        """A handle for ops.matmul.Group; None if no native kernel takes this shape. Raises CodecError if a part does
        not fit.
        """


@runtime_checkable
class OwnProduct(Protocol):
    """Has its own product, because it rounds inputs in a special way. The reference of its kernel, if it has one."""

    def multiply(self, parts: Parts, shape: Shape, x: F32, rounding: Rounding) -> F32:
        """x [T, K] -> x W^T, float32 [T, N]; rounding "none" leaves the inputs as they are.

        Raises CodecError if a part does not fit.
        """


@runtime_checkable
class HoldsBias(Protocol):
    """Stores the bias of the linear layer in its parts, so that a product may already include it."""

    def holds_bias(self, tokens: int, rounding: str) -> bool:
        """True if the product of `tokens` tokens with this rounding includes the bias: not to be added again."""


# ---------------------------------------------------------------- options


@runtime_checkable
class Configurable(Protocol):
    """Takes options: `polyquant.codec(name, **options)`."""

    def configure(self, *_: Any, **options: Any) -> Codec:
        """The codec with other options. Raises TypeError for an unknown option, CodecError for an invalid value."""


@runtime_checkable
class Tiled(Protocol):
    """Its layout depends on a tile that files do not store."""

    @property
    def tile(self) -> Tile | None:
        """The tile; None to use the known model's tile for the shape."""

    def with_tile(self, tile: Tile) -> Codec:
        """The codec with a different tile. Raises CodecError for an invalid tile."""


@runtime_checkable
class Fitted(Protocol):
    """Has options that suit only some shapes, to be checked in advance, since `specs` needs no options."""

    def fit(self, shape: Shape) -> object:
        """Raise CodecError if the options do not suit a weight of this shape, or one is missing."""


# ---------------------------------------------------------------- bytes


@runtime_checkable
class Swappable(Protocol):
    """Rows of blocks with multi-byte fields, which big-endian files store byte-swapped."""

    @property
    def fields(self) -> tuple[Field, ...]:
        """The multi-byte fields of a block; empty for bytes only."""


@runtime_checkable
class Opaque(Protocol):
    """Bytes of a type that is not decoded, only copied. `quantize` and `dequantize` raise UnsupportedError."""

    @property
    def why(self) -> str:
        """A description of the type, for display."""

    @property
    def finding(self) -> str | None:
        """The finding of a validation for such a tensor; None if the format reports it once for all of them."""


@runtime_checkable
class CountsSymbols(Protocol):
    """Two-bit ternary symbols whose order shows in their counts."""

    @property
    def zero_symbol(self) -> int:
        """The symbol (0, 1 or 2) that means zero; symbol 3 is undefined."""

    def symbol_histogram(self, parts: Parts, shape: Shape) -> NDArray[np.uint64]:
        """Count each symbol, uint64 [4]: rows * K in total. Raises CodecError if a part does not fit."""


@runtime_checkable
class DecodesRows(Protocol):
    """Not `row_sliced`, but `dequantize(rows=...)` of all parts may decode only these rows."""

    @property
    def decodes_rows(self) -> bool:
        """True if it does, so that callers can decode row block by row block from loaded parts."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The location of one matrix's part within the stack's part: spans along an axis, in order. An integer is a run of
    zeros.
    """

    pieces: tuple[slice | int, ...]
    axis: int = 0


@runtime_checkable
class Stackable(Protocol):
    """Not `row_sliced`, but one matrix of a stack [..., rows, K] can be extracted with its bytes unchanged."""

    def cut(self, shape: Shape, index: int) -> tuple[Codec, Mapping[str, Cut]]:
        """The codec of matrix `index` as a weight [rows, K], and the cut of each part. Raises CodecError for matrices
        that share bytes.
        """


@runtime_checkable
class MaybeIntegers(Protocol):
    """Unquantized values of one dtype, possibly integers."""

    @property
    def is_integer(self) -> bool:
        """True for integers and booleans: not weights, but perhaps the codes of an unsupported quantization."""


# ---------------------------------------------------------------- codes


@runtime_checkable
class HoldsBlocks(Protocol):
    """Codes that are the blocks of another codec, in other parts."""

    @property
    def holds(self) -> str:
        """The codec whose blocks `unpack` returns and `pack` takes."""


@runtime_checkable
class QuantizesStored(Protocol):
    """Quantizes rows in the layout of another codec without an array of their floats."""

    def quantize_stored(
        self, source: str, stored: NDArray[Any], shape: Shape, *, importance: F32 | None = None, measure: bool = True
    ) -> tuple[Parts, tuple[float, ...]] | None:
        """Parts of rows [rows, K], and the sums of ops.metrics.ErrorSums without its count; None where it takes floats.

        source: the name of a codec; stored: its part "blocks"; importance: [K]; measure: False leaves the sums zero.
        Equal to the parts that `quantize` and `pack` make of the dequantized rows.
        """


@runtime_checkable
class PacksRows(Protocol):
    """Affine codes whose parts cannot be cut by rows (transposed, packed along rows), filled row block by row block."""

    def unpack_rows(self, parts: Parts, shape: Shape, rows: slice) -> Affine:
        """Codes of rows [a, b) of complete parts. Raises CodecError if a part does not fit."""

    def empty(self, shape: Shape) -> dict[str, NDArray[Any]]:
        """Complete parts of a weight [N, K] for `pack_rows`."""

    def pack_rows(self, codes: Affine, start: int, out: dict[str, NDArray[Any]], shape: Shape) -> None:
        """Write the codes of rows [start, start + n), multiples of 32 except at the end, into `out`.

        Raises CodecError for codes that the codec cannot hold.
        """


@runtime_checkable
class CutsParts(Protocol):
    """Small floats whose parts can be cut by rows, although an entry of some belongs to several rows or to all."""

    @property
    def lines(self) -> Mapping[str, int]:
        """Part -> rows of the weight for one entry of its first axis; 0: one entry for all rows."""

    @property
    def needs_peak(self) -> bool:
        """True if rows can only be quantized with the largest magnitude of the whole weight."""


@runtime_checkable
class MayFixInputs(Protocol):
    """Affine codes whose layer's inputs may have a fixed grid (static quantization)."""

    def input_grid(self, parts: Parts, codes: Affine) -> Activation | None:
        """The grid for rows of codes; None without one. Its quant_bias lacks the layer's bias. parts: complete.

        Raises CodecError if a part does not fit, or a sum does not fit int32.
        """


@runtime_checkable
class ScalesInputs(Codec, Protocol):
    """May store a scale of statically quantized inputs, which is measured on a text."""

    @property
    def scales_inputs(self) -> bool:
        """True if it does."""

    def with_inputs(self, codes: Any, low: float, high: float) -> Any:
        """The codes with the scale for inputs from `low` to `high`."""


@runtime_checkable
class HoldsAffineCodes(Protocol):
    """Affine codes of other tools, whose tables and codes are read separately."""

    @property
    def integers(self) -> Any:
        """Its traits (codecs.keeping.Integers)."""

    def group_tables(self, parts: Parts, shape: Shape) -> tuple[F32, F32, F32 | None, NDArray[Any] | None]:
        """Scales, offsets and biases per group, [N, G], and the group of each column, [K], or None."""

    def codes_of(self, parts: Parts, shape: Shape, rows: slice) -> NDArray[np.int8]:
        """Signed codes of rows [a, b), int8 [b - a, K]. Raises CodecError if a part does not fit."""


@runtime_checkable
class MayNeedPeak(Codec, Protocol):
    """Quantizes rows of a weight with a scale that depends on the whole weight."""

    @property
    def needs_peak(self) -> bool:
        """True if there is such a scale."""

    def quantize(self, w: F32, *, importance: F32 | None = None, peak: float | None = None) -> Any:
        """Quantize rows [..., K]. peak: the largest magnitude of the whole weight."""


@runtime_checkable
class WithBits(Protocol):
    """Codes of one width."""

    @property
    def bits(self) -> int:
        """Bits of a stored code, without scales."""


@runtime_checkable
class Grouped(Protocol):
    """Codes of one width on evenly spaced levels, with a scale per group of columns."""

    @property
    def bits(self) -> int:
        """Bits of a stored code."""

    @property
    def group(self) -> int:
        """Columns per scale; 0 for the whole row."""


@runtime_checkable
class Ordered(Protocol):
    """Columns may be assigned to groups in any order (act-order)."""

    @property
    def ordered(self) -> bool:
        """True if they are."""


@runtime_checkable
class TrellisDialect(Protocol):
    """Trellis codes in any container."""

    def trellis(self, shape: Shape) -> Codec:
        """The codec of Trellis v3 (codecs.trellis.Trellis) for a weight of this shape with the same codes.

        Raises CodecError for an unsupported shape.
        """


# ---------------------------------------------------------------- searches


@runtime_checkable
class MayOnlyRead(Protocol):
    """One of a family of codecs, some of which cannot be written."""

    @property
    def writable(self) -> bool:
        """False where `quantize` raises UnsupportedError, so that plans refuse the codec before the work."""


@runtime_checkable
class FitsInputs(Codec, Protocol):
    """Searches for the codes with the least error on the inputs of a layer."""

    def quantize_for(self, w: F32, hessian: F32) -> Form:
        """Quantize w [N, K] with hessian [K, K], the mean of x x^T.

        Raises CodecError, numpy.linalg.LinAlgError if the Hessian is not positive definite.
        """
