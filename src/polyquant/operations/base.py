"""The base class of operations, the identity operation, and shared checks."""

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
    """Return (rows, K) of a logical shape, like types.as_matrix."""
    return (math.prod(shape[:-1]), shape[-1]) if shape else (1, 1)


class Operation(ABC):
    """A rule for the rows of a target. shapes: the logical shapes of its sources, in order."""

    __slots__ = ()

    @property
    def moves(self) -> bool:
        """True if values are only moved."""
        return True

    @property
    def identity(self) -> bytes:
        """A unique key of this operation."""
        values: list[object] = [getattr(self, f.name) for f in fields(self)] if is_dataclass(self) else []
        return b"(" + type(self).__name__.encode() + b"".join(_identity(v) for v in values) + b")"

    @abstractmethod
    def shape(self, shapes: Sequence[Shape], tensor: str = "") -> Shape:
        """Return the shape of the target. Raises InputError, naming `tensor`, for sources that do not fit."""

    @abstractmethod
    def keeps_rows(self, shapes: Sequence[Shape]) -> bool:
        """True if each target row is a stored source row; otherwise the operation needs floats."""

    def together(self, shapes: Sequence[Shape]) -> int:
        """Return the best number of target rows per block: other block sizes read a source more than once."""
        return 1

    @abstractmethod
    def needs(self, rows: Index, shapes: Sequence[Shape]) -> tuple[Index, ...]:
        """Return the rows of each source needed for these target rows, in the order expected by `make`."""

    @abstractmethod
    def make(self, pieces: Sequence[Array], rows: Index, shapes: Sequence[Shape]) -> Array:
        """Make these target rows [n, ...] from the rows [n_i, ...] of each source that `needs` returns."""

    @abstractmethod
    def reference(self, arrays: Sequence[Array]) -> Array:
        """Make the whole target from whole sources."""

    @abstractmethod
    def inverse(self, shapes: Sequence[Shape]) -> tuple[Operation, ...]:
        """Return, per source, the operation that restores it from the target.

        Raises UnsupportedError if information is lost.
        """


def _identity(value: object) -> bytes:
    if isinstance(value, Operation):
        return value.identity
    if isinstance(value, tuple):
        return b"[" + b"".join(_identity(v) for v in value) + b"]"
    return b" " + (value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode())


def refuse(tensor: str, message: str, expected: object, found: object) -> InputError:
    """Return the error for a source that does not fit."""
    return InputError(message, tensor=tensor or None, expected=expected, found=found)


def single(shapes: Sequence[Shape], tensor: str) -> Shape:
    """Return the shape of the only source. Raises InputError for several."""
    if len(shapes) != 1:
        raise refuse(tensor, "requires a single source tensor", "1 source", f"{len(shapes)} sources")
    return shapes[0]


def partial(op: Operation) -> UnsupportedError:
    """Return the error for inverting an operation that drops a part of its source."""
    return UnsupportedError(
        f"{type(op).__name__} drops a part of its source and cannot be inverted",
        hint="invert all the operations on that source together",
    )


def alike(shapes: Sequence[Shape], tensor: str) -> None:
    """Raise InputError if there are no shapes, or different ones."""
    if not shapes:
        raise refuse(tensor, "has no source tensors", "a source", "none")
    for shape in shapes[1:]:
        if shape != shapes[0]:
            raise refuse(tensor, "is made of tensors of different shapes", list(shapes[0]), list(shape))


def placed(pieces: Sequence[Array], which: Index) -> Array:
    """Merge pieces: row i is the next row of piece which[i]."""
    filled = [j for j, piece in enumerate(pieces) if len(piece)]
    if len(filled) <= 1:
        return pieces[filled[0] if filled else 0]
    out = np.empty((len(which), *pieces[filled[0]].shape[1:]), pieces[filled[0]].dtype)
    for j in filled:
        out[which == j] = pieces[j]
    return out


@dataclass(frozen=True, slots=True)
class Same(Operation):
    """The unchanged source."""

    def shape(self, shapes: Sequence[Shape], tensor: str = "") -> Shape:
        """Return the source's shape."""
        return single(shapes, tensor)

    def keeps_rows(self, shapes: Sequence[Shape]) -> bool:
        """True."""
        return True

    def needs(self, rows: Index, shapes: Sequence[Shape]) -> tuple[Index, ...]:
        """Return these rows."""
        return (rows,)

    def make(self, pieces: Sequence[Array], rows: Index, shapes: Sequence[Shape]) -> Array:
        """Return the piece."""
        return pieces[0]

    def reference(self, arrays: Sequence[Array]) -> Array:
        """Return the array."""
        return arrays[0]

    def inverse(self, shapes: Sequence[Shape]) -> tuple[Operation, ...]:
        """Return itself."""
        return (self,)


SAME = Same()
