"""Operations along one axis: reorder, slice, and combine several tensors.

Rows are preserved except along the last axis.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from polyquant.operations.base import Array, Index, Operation, Shape, alike, partial, placed, refuse

__all__ = ["AlongAxis", "Concat", "Interleave", "Rows", "Slice"]


class AlongAxis(Operation):
    """Entry m of the target's axis is entry index[m] of the axis of source which[m].

    Rows are preserved except along the last axis.
    """

    __slots__ = ()
    axis: int

    @abstractmethod
    def places(self, sizes: Sequence[int]) -> tuple[Index, Index]:
        """Return (which, index) of each entry. sizes: length of the axis in each source."""

    @abstractmethod
    def fits(self, sizes: Sequence[int], tensor: str) -> None:
        """Raise InputError for sizes that `places` does not support."""

    def shape(self, shapes: Sequence[Shape], tensor: str = "") -> Shape:
        """Return the sources' shape with the new axis length.

        Raises InputError for a missing axis, and for sources that differ elsewhere.
        """
        if not shapes or not 0 <= self.axis < len(shapes[0]):
            raise refuse(tensor, "has no such axis", f"axis {self.axis}", [list(s) for s in shapes])
        a = self.axis
        alike([s[:a] + s[a + 1 :] if len(s) > a else s for s in shapes], tensor)
        sizes = [s[a] for s in shapes]
        self.fits(sizes, tensor)
        return (*shapes[0][:a], len(self.places(sizes)[0]), *shapes[0][a + 1 :])

    def keeps_rows(self, shapes: Sequence[Shape]) -> bool:
        """True except along the last axis."""
        return self.axis < len(shapes[0]) - 1

    def _split(self, rows: Index, shapes: Sequence[Shape]) -> tuple[Index, Index]:
        """Return (which source, which of its rows) of each target row."""
        a, sizes = self.axis, [s[self.axis] for s in shapes]
        which, index = self.places(sizes)
        inner = math.prod(shapes[0][a + 1 : -1])
        outer, rest = np.divmod(rows, max(1, len(which) * inner))
        entry, offset = np.divmod(rest, max(1, inner))
        chosen = which[entry]
        return chosen, (outer * np.asarray(sizes, np.int64)[chosen] + index[entry]) * inner + offset

    def needs(self, rows: Index, shapes: Sequence[Shape]) -> tuple[Index, ...]:
        """Return the needed rows of each source; along the last axis, the same rows of all."""
        if not self.keeps_rows(shapes):
            return (rows,) * len(shapes)
        which, source_rows = self._split(rows, shapes)
        return (source_rows,) if len(shapes) == 1 else tuple(source_rows[which == j] for j in range(len(shapes)))

    def make(self, pieces: Sequence[Array], rows: Index, shapes: Sequence[Shape]) -> Array:
        """Place rows, or columns along the last axis."""
        if self.keeps_rows(shapes):
            return pieces[0] if len(shapes) == 1 else placed(pieces, self._split(rows, shapes)[0])
        which, index = self.places([s[self.axis] for s in shapes])
        if len(shapes) == 1:
            return np.ascontiguousarray(pieces[0][:, index])
        out = np.empty((len(rows), len(which)), pieces[0].dtype)
        for j, piece in enumerate(pieces):
            out[:, which == j] = piece[:, index[which == j]]
        return out


@dataclass(frozen=True, slots=True, eq=False)
class Rows(AlongAxis):
    """Entry i of the axis is entry order[i] of the source. order: int64."""

    order: Index
    axis: int = 0

    def fits(self, sizes: Sequence[int], tensor: str) -> None:
        """Raise InputError if the order refers to missing entries."""
        if len(sizes) != 1:
            raise refuse(tensor, "requires a single source tensor", "1 source", f"{len(sizes)} sources")
        low, high = int(self.order.min(initial=0)), int(self.order.max(initial=-1))
        if low < 0 or high >= sizes[0]:
            raise refuse(tensor, "rows are out of range", f"0 to {sizes[0] - 1}", f"{low} to {high}")

    def places(self, sizes: Sequence[int]) -> tuple[Index, Index]:
        """Return `order`."""
        return np.zeros(len(self.order), np.int64), self.order

    def reference(self, arrays: Sequence[Array]) -> Array:
        """See numpy.take."""
        return np.take(arrays[0], self.order, self.axis)

    def inverse(self, shapes: Sequence[Shape]) -> tuple[Operation, ...]:
        """Return the inverse permutation. Raises UnsupportedError if `order` is not a permutation."""
        if not np.array_equal(np.sort(self.order), np.arange(shapes[0][self.axis])):
            raise partial(self)
        return (Rows(np.argsort(self.order), self.axis),)


@dataclass(frozen=True, slots=True)
class Slice(AlongAxis):
    """Entries start, start + step, ... below stop of an axis."""

    start: int
    stop: int
    step: int = 1
    axis: int = 0

    def fits(self, sizes: Sequence[int], tensor: str) -> None:
        """Raise InputError for entries out of range."""
        if len(sizes) != 1:
            raise refuse(tensor, "requires a single source tensor", "1 source", f"{len(sizes)} sources")
        if not (0 <= self.start <= self.stop <= sizes[0] and self.step >= 1):
            raise refuse(tensor, "rows are out of range", f"0 to {sizes[0]}", f"{self.start} to {self.stop}")

    def places(self, sizes: Sequence[int]) -> tuple[Index, Index]:
        """Return the range."""
        range_ = np.arange(self.start, self.stop, self.step, dtype=np.int64)
        return np.zeros(len(range_), np.int64), range_

    def reference(self, arrays: Sequence[Array]) -> Array:
        """See numpy's slicing."""
        return np.asarray(arrays[0][(slice(None),) * self.axis + (slice(self.start, self.stop, self.step),)])

    def inverse(self, shapes: Sequence[Shape]) -> tuple[Operation, ...]:
        """Raise UnsupportedError: the other entries are lost."""
        raise partial(self)


@dataclass(frozen=True, slots=True)
class Concat(AlongAxis):
    """Tensors concatenated along an axis."""

    axis: int = 0

    def fits(self, sizes: Sequence[int], tensor: str) -> None:
        """Accept any sizes."""

    def places(self, sizes: Sequence[int]) -> tuple[Index, Index]:
        """Return all of the first source, then all of the second, ..."""
        return np.repeat(np.arange(len(sizes)), sizes), np.concatenate([np.arange(n) for n in sizes])

    def reference(self, arrays: Sequence[Array]) -> Array:
        """See numpy.concatenate."""
        return np.concatenate(arrays, self.axis)

    def inverse(self, shapes: Sequence[Shape]) -> tuple[Operation, ...]:
        """Return one slice per source."""
        ends = np.cumsum([s[self.axis] for s in shapes]).tolist()
        return tuple(Slice(end - s[self.axis], end, axis=self.axis) for end, s in zip(ends, shapes, strict=True))


@dataclass(frozen=True, slots=True)
class Interleave(AlongAxis):
    """Tensors of one shape whose entries along an axis alternate: the first of each, then the second of each, ..."""

    axis: int = 0

    def fits(self, sizes: Sequence[int], tensor: str) -> None:
        """Raise InputError for different sizes."""
        alike([(n,) for n in sizes], tensor)

    def places(self, sizes: Sequence[int]) -> tuple[Index, Index]:
        """Return alternating entries."""
        entries = np.arange(len(sizes) * sizes[0])
        return entries % len(sizes), entries // len(sizes)

    def reference(self, arrays: Sequence[Array]) -> Array:
        """Stack after the axis, then flatten."""
        shape = arrays[0].shape
        return np.stack(arrays, self.axis + 1).reshape((*shape[: self.axis], -1, *shape[self.axis + 1 :]))

    def inverse(self, shapes: Sequence[Shape]) -> tuple[Operation, ...]:
        """Return every n-th entry."""
        n, size = len(shapes), shapes[0][self.axis]
        return tuple(Slice(j, n * size, n, self.axis) for j in range(n))
