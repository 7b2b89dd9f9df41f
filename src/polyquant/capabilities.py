"""What a codec may be able to do beyond `types.Codec`: one protocol for each, asked for with isinstance.

    if isinstance(codec, Packed):
        handle = codec.packed(parts, shape)

A codec claims a capability by having its members, in this package or in another; nothing is registered. `polyquant.testing.codecs` holds the claims
against what the codec does. Callers ask for a capability and never for the class of a codec, so that a new codec changes no caller.

    runs        Packed, OwnProduct, HoldsBias
    options     Configurable, Tiled, Fitted
    bytes       Swappable, Opaque, CountsSymbols, DecodesRows, Stackable, WholeNumbers
    codes       HoldsBlocks, WithBits, Grouped, Ordered, WithOffsets, TrellisDialect
    searches    FitsInputs, MayOnlyRead
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeGuard, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from polyquant.types import F32, Codec, Form, Parts, Rounding, Shape

__all__ = [
    "Configurable", "CountsSymbols", "Cut", "DecodesRows", "Field", "FitsInputs", "Fitted", "Grouped", "HoldsBias", "HoldsBlocks", "MayOnlyRead", "Opaque", "Ordered", "OwnProduct", "Packed",
    "Stackable", "Swappable", "Tile", "Tiled", "TrellisDialect", "WholeNumbers", "WithBits", "WithOffsets", "claims",
]  # fmt: skip

Tile: TypeAlias = tuple[int, int, int]
"""(BM, BK, bm) of bitnet.cpp's kernel_config.ini (there: bm, bk, bmm)."""
Field: TypeAlias = tuple[int, int, int]
"""A multi-byte number inside a block: (offset, item size, count). Big-endian files store these swapped."""


C = TypeVar("C")
_claimed: dict[tuple[type, type], bool] = {}


def claims(codec: Codec, capability: type[C]) -> TypeGuard[C]:
    """isinstance, remembered by the codec's class: Python looks for every member anew, and plans ask for each of many tensors."""
    key = type(codec), capability
    if key not in _claimed:
        _claimed[key] = isinstance(codec, capability)
    return _claimed[key]


# ---------------------------------------------------------------- multiplication


@runtime_checkable
class Packed(Protocol):
    """Can be multiplied as it lies, by a native kernel."""

    def packed(self, parts: Parts, shape: Shape) -> Any | None:
        """A handle for ops.matmul.Group; None where no kernel takes this shape, and without native kernels. Raises CodecError if a part does not fit."""


@runtime_checkable
class OwnProduct(Protocol):
    """Brings its own product, since it rounds the inputs in a way of its own. The reference of its kernel, if it has one."""

    def multiply(self, parts: Parts, shape: Shape, x: F32, rounding: Rounding) -> F32:
        """x [T, K] -> x W^T, float32 [T, N]; rounding "none" leaves the inputs as they are. Raises CodecError if a part does not fit."""


@runtime_checkable
class HoldsBias(Protocol):
    """Its parts hold the bias of the linear layer, so that a product may have it already."""

    def holds_bias(self, tokens: int, rounding: str) -> bool:
        """True if the product of so many tokens with this rounding has the bias in it: adding it would count it twice."""


# ---------------------------------------------------------------- options


@runtime_checkable
class Configurable(Protocol):
    """Takes options: `polyquant.codec(name, **options)`."""

    def configure(self, *_: Any, **options: Any) -> Codec:
        """The same with other options. Raises TypeError for an option it does not have, CodecError for a value that makes no codec."""


@runtime_checkable
class Tiled(Protocol):
    """Its bytes follow a tile that no file states."""

    @property
    def tile(self) -> Tile | None:
        """The tile; None where that of a known model is to be taken by the shape."""

    def with_tile(self, tile: Tile) -> Codec:
        """The same with another tile. Raises CodecError for what is no tile."""


@runtime_checkable
class Fitted(Protocol):
    """Has options that suit some shapes only: to be asked before the work, for `specs` needs no options."""

    def fit(self, shape: Shape) -> object:
        """Raises CodecError if the options do not suit a weight of this shape, or one is missing."""


# ---------------------------------------------------------------- bytes


@runtime_checkable
class Swappable(Protocol):
    """Rows of blocks whose numbers a big-endian file stores the other way round."""

    @property
    def fields(self) -> tuple[Field, ...]:
        """The numbers of more than one byte in a block; empty where a block is bytes only."""


@runtime_checkable
class Opaque(Protocol):
    """Bytes of a type that is not decoded: carried, never read. `quantize` and `dequantize` raise UnsupportedError."""

    @property
    def why(self) -> str:
        """What is known about the type, for people."""

    @property
    def finding(self) -> str | None:
        """What a validation says of such a tensor; None where the format says it once for all of them."""


@runtime_checkable
class CountsSymbols(Protocol):
    """Ternary symbols of two bits, whose order shows in their counts."""

    @property
    def zero_symbol(self) -> int:
        """Which of the symbols 0, 1, 2 means zero; symbol 3 means nothing."""

    def symbol_histogram(self, parts: Parts, shape: Shape) -> NDArray[np.uint64]:
        """How often each symbol occurs, uint64 [4]: rows * K in all. Raises CodecError if a part does not fit."""


@runtime_checkable
class DecodesRows(Protocol):
    """Not `row_sliced`, but `dequantize(rows=...)` of whole parts may decode only these rows."""

    @property
    def decodes_rows(self) -> bool:
        """True if it does: then a caller can go row block by row block over parts that it holds."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Where a part of one matrix lies in the same part of a stack: these spans of an axis, one after the other; a number stands for so many zeros."""

    pieces: tuple[slice | int, ...]
    axis: int = 0


@runtime_checkable
class Stackable(Protocol):
    """Not `row_sliced`, but one matrix of a stack [..., rows, K] can be taken out of the parts with its bytes unchanged."""

    def cut(self, shape: Shape, index: int) -> tuple[Codec, Mapping[str, Cut]]:
        """The codec of matrix `index` as a weight [rows, K], and where each of its parts lies. Raises CodecError, which says why, for matrices that share bytes."""


@runtime_checkable
class WholeNumbers(Protocol):
    """Numbers of one dtype, unquantized, that may be whole."""

    @property
    def whole(self) -> bool:
        """True for integers and booleans: no weights by themselves, but maybe the codes of a quantization that is not read."""


# ---------------------------------------------------------------- codes


@runtime_checkable
class HoldsBlocks(Protocol):
    """Codes that are the blocks of another codec, in parts of its own."""

    @property
    def holds(self) -> str:
        """The codec whose blocks `unpack` gives and `pack` takes."""


@runtime_checkable
class WithBits(Protocol):
    """Codes of one width."""

    @property
    def bits(self) -> int:
        """Bits of a code as it is stored, scales aside."""


@runtime_checkable
class Grouped(Protocol):
    """Codes of one width on even levels, with a scale for so many columns of a row."""

    @property
    def bits(self) -> int:
        """Bits of a code as it is stored."""

    @property
    def group(self) -> int:
        """Columns of a scale; 0 for the whole row."""


@runtime_checkable
class Ordered(Protocol):
    """Columns may name their groups, which then are no neighbours."""

    @property
    def ordered(self) -> bool:
        """True if they do."""


@runtime_checkable
class WithOffsets(Protocol):
    """Can say the offsets of its codes without unpacking the codes."""

    def offsets(self, parts: Parts, shape: Shape) -> F32:
        """What is subtracted from codes, float32 of any shape; zeros for none. Raises CodecError if a part does not fit."""


@runtime_checkable
class TrellisDialect(Protocol):
    """Trellis codes in any container."""

    def trellis(self, shape: Shape) -> Codec:
        """The codec of Trellis v3 (codecs.trellis.Trellis) that holds a weight of this shape with the same codes. Raises CodecError for a shape that the codec does not take."""


# ---------------------------------------------------------------- searches


@runtime_checkable
class MayOnlyRead(Protocol):
    """One of a family of codecs, some of which cannot be written."""

    @property
    def writable(self) -> bool:
        """False where `quantize` raises UnsupportedError, so that plans refuse the codec before the work."""


@runtime_checkable
class FitsInputs(Codec, Protocol):
    """Searches for the codes of least error on the inputs that a layer sees."""

    def quantize_for(self, w: F32, hessian: F32) -> Form:
        """w [N, K], hessian [K, K] (mean of x x^T) -> codes. Raises CodecError, numpy.linalg.LinAlgError if the Hessian is not positive definite."""
