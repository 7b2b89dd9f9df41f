"""Other axes for the same numbers, stacks and their entries, matrices turned."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from polyquant.operations.base import Array, Index, Operation, Shape, alike, matrix, partial, placed, refuse, single

__all__ = ["Matrix", "Reshape", "Stack", "Transpose"]


@dataclass(frozen=True, slots=True)
class Reshape(Operation):
    """Other axes for the same numbers in the same order. Rows stay rows where the last axis keeps its length."""

    to: Shape

    def shape(self, shapes: Sequence[Shape], tensor: str = "") -> Shape:
        """`to`. Raises InputError for another number of entries."""
        found = single(shapes, tensor)
        if math.prod(found) != math.prod(self.to):
            raise refuse(tensor, "cannot have these axes", list(self.to), list(found))
        return self.to

    def keeps_rows(self, shapes: Sequence[Shape]) -> bool:
        """Where the last axis keeps its length."""
        return matrix(shapes[0])[1] == matrix(self.to)[1]

    def together(self, shapes: Sequence[Shape]) -> int:
        """All where rows become other rows."""
        return 1 if self.keeps_rows(shapes) else max(1, matrix(self.to)[0])

    def needs(self, rows: Index, shapes: Sequence[Shape]) -> tuple[Index, ...]:
        """These, or all."""
        return (rows if self.keeps_rows(shapes) else np.arange(matrix(shapes[0])[0]),)

    def make(self, pieces: Sequence[Array], rows: Index, shapes: Sequence[Shape]) -> Array:
        """The rows, or all of them anew."""
        return pieces[0] if self.keeps_rows(shapes) else pieces[0].reshape(matrix(self.to))[rows]

    def reference(self, arrays: Sequence[Array]) -> Array:
        """numpy's reshape."""
        return arrays[0].reshape(self.to)

    def inverse(self, shapes: Sequence[Shape]) -> tuple[Operation, ...]:
        """The source's axes."""
        return (Reshape(tuple(shapes[0])),)


@dataclass(frozen=True, slots=True)
class Matrix(Operation):
    """Entry `index` of a stack [n, ...], without its first axis."""

    index: int

    def shape(self, shapes: Sequence[Shape], tensor: str = "") -> Shape:
        """Without the first axis. Raises InputError for what is no stack, or too small a one."""
        found = single(shapes, tensor)
        if len(found) < 2 or not 0 <= self.index < found[0]:
            raise refuse(tensor, "is no stack with that entry", f"a stack of more than {self.index}", list(found))
        return found[1:]

    def keeps_rows(self, shapes: Sequence[Shape]) -> bool:
        """Yes."""
        return True

    def needs(self, rows: Index, shapes: Sequence[Shape]) -> tuple[Index, ...]:
        """Those of the entry."""
        return (rows + self.index * matrix(shapes[0][1:])[0],)

    def make(self, pieces: Sequence[Array], rows: Index, shapes: Sequence[Shape]) -> Array:
        """The piece."""
        return pieces[0]

    def reference(self, arrays: Sequence[Array]) -> Array:
        """The entry."""
        return np.asarray(arrays[0][self.index])

    def inverse(self, shapes: Sequence[Shape]) -> tuple[Operation, ...]:
        """None: the other entries are not there."""
        raise partial(self)


@dataclass(frozen=True, slots=True)
class Stack(Operation):
    """n tensors of one shape -> [n, ...]."""

    def shape(self, shapes: Sequence[Shape], tensor: str = "") -> Shape:
        """[n, ...]. Raises InputError for none, and for different shapes."""
        alike(shapes, tensor)
        return (len(shapes), *shapes[0])

    def keeps_rows(self, shapes: Sequence[Shape]) -> bool:
        """Yes."""
        return True

    def needs(self, rows: Index, shapes: Sequence[Shape]) -> tuple[Index, ...]:
        """Of each source those that lie in its entry."""
        each = max(1, matrix(shapes[0])[0])
        which = rows // each
        return tuple(rows[which == j] - j * each for j in range(len(shapes)))

    def make(self, pieces: Sequence[Array], rows: Index, shapes: Sequence[Shape]) -> Array:
        """The pieces at their places."""
        return placed(pieces, rows // max(1, matrix(shapes[0])[0]))

    def reference(self, arrays: Sequence[Array]) -> Array:
        """numpy's stack."""
        return np.stack(arrays)

    def inverse(self, shapes: Sequence[Shape]) -> tuple[Operation, ...]:
        """The entries."""
        return tuple(Matrix(j) for j in range(len(shapes)))


@dataclass(frozen=True, slots=True)
class Transpose(Operation):
    """The last two axes exchanged: of a matrix, or of each matrix of a stack."""

    def shape(self, shapes: Sequence[Shape], tensor: str = "") -> Shape:
        """[..., K, N] of [..., N, K]. Raises InputError for a vector."""
        found = single(shapes, tensor)
        if len(found) < 2:
            raise refuse(tensor, "cannot be transposed", "a matrix", list(found))
        return (*found[:-2], found[-1], found[-2])

    def keeps_rows(self, shapes: Sequence[Shape]) -> bool:
        """No: columns become rows."""
        return False

    def together(self, shapes: Sequence[Shape]) -> int:
        """One matrix."""
        return max(1, shapes[0][-1])

    def needs(self, rows: Index, shapes: Sequence[Shape]) -> tuple[Index, ...]:
        """All rows of the matrices that they lie in."""
        n, k = shapes[0][-2:]
        return ((np.unique(rows // max(1, k))[:, None] * n + np.arange(n)).reshape(-1),)

    def make(self, pieces: Sequence[Array], rows: Index, shapes: Sequence[Shape]) -> Array:
        """Rows of the transposed matrices."""
        n, k = shapes[0][-2:]
        held, place = np.unique(rows // max(1, k), return_inverse=True)
        turned = pieces[0].reshape(len(held), n, k).swapaxes(1, 2)
        return np.asarray(turned[place, rows % max(1, k)])

    def reference(self, arrays: Sequence[Array]) -> Array:
        """numpy's swapaxes."""
        return arrays[0].swapaxes(-1, -2)

    def inverse(self, shapes: Sequence[Shape]) -> tuple[Operation, ...]:
        """Itself."""
        return (self,)
