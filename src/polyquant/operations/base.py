"""What an operation is, the one that changes nothing, and the checks that all share."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from polyquant.errors import InputError, UnsupportedError

__all__ = [
    "SAME", "Array", "Index", "Operation", "Same", "Shape", "alike", "matrix", "partial", "placed", "refuse", "single",
]  # fmt: skip

Index: TypeAlias = NDArray[np.int64]
Array: TypeAlias = NDArray[Any]
Shape: TypeAlias = tuple[int, ...]


def matrix(shape: Shape) -> tuple[int, int]:
    """(rows, K) of a logical shape, as types.as_matrix says it."""
    return (math.prod(shape[:-1]), shape[-1]) if shape else (1, 1)


class Operation(ABC):
    """A rule for the rows of a target. shapes: the logical shapes of its sources, in order."""

    __slots__ = ()

    @property
    def moves(self) -> bool:
        """True if numbers only change places."""
        return True

    @property
    def identity(self) -> bytes:
        """Tells it from every other operation."""
        values: list[object] = [getattr(self, f.name) for f in fields(self)] if is_dataclass(self) else []
        return b"(" + type(self).__name__.encode() + b"".join(_identity(v) for v in values) + b")"

    @abstractmethod
    def shape(self, shapes: Sequence[Shape], tensor: str = "") -> Shape:
        """Shape of the target. Raises InputError, of `tensor`, for sources that do not fit."""

    @abstractmethod
    def keeps_rows(self, shapes: Sequence[Shape]) -> bool:
        """True if each target row is a source row as it is stored; else the operation needs floats."""

    def together(self, shapes: Sequence[Shape]) -> int:
        """Target rows that are best made together: blocks of other sizes read a source more than once."""
        return 1

    @abstractmethod
    def needs(self, rows: Index, shapes: Sequence[Shape]) -> tuple[Index, ...]:
        """Rows of each source that these target rows are made of, in the order in which `make` takes them."""

    @abstractmethod
    def make(self, pieces: Sequence[Array], rows: Index, shapes: Sequence[Shape]) -> Array:
        """These target rows [n, ...] of the rows [n_i, ...] of each source that `needs` names."""

    @abstractmethod
    def reference(self, arrays: Sequence[Array]) -> Array:
        """The whole target of whole sources."""

    @abstractmethod
    def inverse(self, shapes: Sequence[Shape]) -> tuple[Operation, ...]:
        """For each source the operation that makes it of the target. Raises UnsupportedError where the target does not hold it whole."""


def _identity(value: object) -> bytes:
    if isinstance(value, Operation):
        return value.identity
    if isinstance(value, tuple):
        return b"[" + b"".join(_identity(v) for v in value) + b"]"
    return b" " + (value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode())


def refuse(tensor: str, message: str, expected: object, found: object) -> InputError:
    """What a source that does not fit raises."""
    return InputError(message, tensor=tensor or None, expected=expected, found=found)


def single(shapes: Sequence[Shape], tensor: str) -> Shape:
    """The shape of the one source. Raises InputError for several."""
    if len(shapes) != 1:
        raise refuse(tensor, "is made of one tensor", "1 source", f"{len(shapes)} sources")
    return shapes[0]


def partial(op: Operation) -> UnsupportedError:
    """What asking for the inverse raises where a part of the source is gone."""
    return UnsupportedError(
        f"{type(op).__name__} leaves out a part of its source, so that nothing brings the source back",
        hint="invert all the operations on that source together",
    )


def alike(shapes: Sequence[Shape], tensor: str) -> None:
    """Raises InputError for no shape, and for different ones."""
    if not shapes:
        raise refuse(tensor, "is made of nothing", "a source", "none")
    for found in shapes[1:]:
        if found != shapes[0]:
            raise refuse(tensor, "is made of tensors of different shapes", list(shapes[0]), list(found))


def placed(pieces: Sequence[Array], which: Index) -> Array:
    """Row i is the next one of piece which[i]."""
    filled = [j for j, piece in enumerate(pieces) if len(piece)]
    if len(filled) <= 1:
        return pieces[filled[0] if filled else 0]
    out = np.empty((len(which), *pieces[filled[0]].shape[1:]), pieces[filled[0]].dtype)
    for j in filled:
        out[which == j] = pieces[j]
    return out


@dataclass(frozen=True, slots=True)
class Same(Operation):
    """The source as it is."""

    def shape(self, shapes: Sequence[Shape], tensor: str = "") -> Shape:
        """That of the source."""
        return single(shapes, tensor)

    def keeps_rows(self, shapes: Sequence[Shape]) -> bool:
        """Yes."""
        return True

    def needs(self, rows: Index, shapes: Sequence[Shape]) -> tuple[Index, ...]:
        """These."""
        return (rows,)

    def make(self, pieces: Sequence[Array], rows: Index, shapes: Sequence[Shape]) -> Array:
        """The piece."""
        return pieces[0]

    def reference(self, arrays: Sequence[Array]) -> Array:
        """The array."""
        return arrays[0]

    def inverse(self, shapes: Sequence[Shape]) -> tuple[Operation, ...]:
        """Itself."""
        return (self,)


SAME = Same()
