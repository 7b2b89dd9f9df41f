"""Operations on axes: reshape, stack, unstack and transpose."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from polyquant.operations.base import Array, Index, Operation, Shape, alike, matrix, partial, placed, refuse, single

__all__ = ["Matrix", "Reshape", "Stack", "Transpose"]


@dataclass(frozen=True, slots=True)
class Reshape(Operation):
    """Other axes for the same values in the same order. Rows are preserved if the last axis keeps its length."""

    to: Shape

    def shape(self, shapes: Sequence[Shape], tensor: str = "") -> Shape:
        """Return `to`. Raises InputError if the number of elements differs."""
        source = single(shapes, tensor)
        if math.prod(source) != math.prod(self.to):
            raise refuse(tensor, "cannot have these axes", list(self.to), list(source))
        return self.to

    def keeps_rows(self, shapes: Sequence[Shape]) -> bool:
        """True if the last axis keeps its length."""
        return matrix(shapes[0])[1] == matrix(self.to)[1]

    def together(self, shapes: Sequence[Shape]) -> int:
        """Return all rows if rows change."""
        return 1 if self.keeps_rows(shapes) else max(1, matrix(self.to)[0])

    def needs(self, rows: Index, shapes: Sequence[Shape]) -> tuple[Index, ...]:
        """Return these rows, or all."""
        return (rows if self.keeps_rows(shapes) else np.arange(matrix(shapes[0])[0]),)

    def make(self, pieces: Sequence[Array], rows: Index, shapes: Sequence[Shape]) -> Array:
        """Return the rows, or reshape all of them."""
        return pieces[0] if self.keeps_rows(shapes) else pieces[0].reshape(matrix(self.to))[rows]

    def reference(self, arrays: Sequence[Array]) -> Array:
        """See numpy.reshape."""
        return arrays[0].reshape(self.to)

    def inverse(self, shapes: Sequence[Shape]) -> tuple[Operation, ...]:
        """Return the reshape to the source's axes."""
        return (Reshape(tuple(shapes[0])),)


@dataclass(frozen=True, slots=True)
class Matrix(Operation):
    """Entry `index` of a stack [n, ...], without its first axis."""

    index: int

    def shape(self, shapes: Sequence[Shape], tensor: str = "") -> Shape:
        """Return the shape without the first axis. Raises InputError if the source is not a stack or is too small."""
        source = single(shapes, tensor)
        if len(source) < 2 or not 0 <= self.index < source[0]:
            raise refuse(tensor, "is not a stack with that entry", f"a stack of more than {self.index}", list(source))
        return source[1:]

    def keeps_rows(self, shapes: Sequence[Shape]) -> bool:
        """True."""
        return True

    def needs(self, rows: Index, shapes: Sequence[Shape]) -> tuple[Index, ...]:
        """Return the rows of the entry."""
        return (rows + self.index * matrix(shapes[0][1:])[0],)

    def make(self, pieces: Sequence[Array], rows: Index, shapes: Sequence[Shape]) -> Array:
        """Return the piece."""
        return pieces[0]

    def reference(self, arrays: Sequence[Array]) -> Array:
        """Return the entry."""
        return np.asarray(arrays[0][self.index])

    def inverse(self, shapes: Sequence[Shape]) -> tuple[Operation, ...]:
        """Raise UnsupportedError: the other entries are lost."""
        raise partial(self)


@dataclass(frozen=True, slots=True)
class Stack(Operation):
    """n tensors of one shape -> [n, ...]."""

    def shape(self, shapes: Sequence[Shape], tensor: str = "") -> Shape:
        """Return [n, ...]. Raises InputError for no sources, and for different shapes."""
        alike(shapes, tensor)
        return (len(shapes), *shapes[0])

    def keeps_rows(self, shapes: Sequence[Shape]) -> bool:
        """True."""
        return True

    def needs(self, rows: Index, shapes: Sequence[Shape]) -> tuple[Index, ...]:
        """Return the rows in each source's entry."""
        each = max(1, matrix(shapes[0])[0])
        which = rows // each
        return tuple(rows[which == j] - j * each for j in range(len(shapes)))

    def make(self, pieces: Sequence[Array], rows: Index, shapes: Sequence[Shape]) -> Array:
        """Merge the pieces."""
        return placed(pieces, rows // max(1, matrix(shapes[0])[0]))

    def reference(self, arrays: Sequence[Array]) -> Array:
        """See numpy.stack."""
        return np.stack(arrays)

    def inverse(self, shapes: Sequence[Shape]) -> tuple[Operation, ...]:
        """Return the entries."""
        return tuple(Matrix(j) for j in range(len(shapes)))


@dataclass(frozen=True, slots=True)
class Transpose(Operation):
    """Exchange the last two axes of a matrix, or of each matrix of a stack."""

    def shape(self, shapes: Sequence[Shape], tensor: str = "") -> Shape:
        """Return [..., K, N] of [..., N, K]. Raises InputError for a vector."""
        source = single(shapes, tensor)
        if len(source) < 2:
            raise refuse(tensor, "cannot be transposed", "a matrix", list(source))
        return (*source[:-2], source[-1], source[-2])

    def keeps_rows(self, shapes: Sequence[Shape]) -> bool:
        """False: columns become rows."""
        return False

    def together(self, shapes: Sequence[Shape]) -> int:
        """Return the rows of one matrix."""
        return max(1, shapes[0][-1])

    def needs(self, rows: Index, shapes: Sequence[Shape]) -> tuple[Index, ...]:
        """Return all rows of the matrices that contain these rows."""
        n, k = shapes[0][-2:]
        return ((np.unique(rows // max(1, k))[:, None] * n + np.arange(n)).reshape(-1),)

    def make(self, pieces: Sequence[Array], rows: Index, shapes: Sequence[Shape]) -> Array:
        """Return rows of the transposed matrices."""
        n, k = shapes[0][-2:]
        matrices, place = np.unique(rows // max(1, k), return_inverse=True)
        transposed = pieces[0].reshape(len(matrices), n, k).swapaxes(1, 2)
        return np.asarray(transposed[place, rows % max(1, k)])

    def reference(self, arrays: Sequence[Array]) -> Array:
        """See numpy.swapaxes."""
        return arrays[0].swapaxes(-1, -2)

    def inverse(self, shapes: Sequence[Shape]) -> tuple[Operation, ...]:
        """Return itself."""
        return (self,)
