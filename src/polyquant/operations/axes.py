"""Entries of one axis: in another order, some of them, or those of several tensors. Rows survive along any axis but the last."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from polyquant.operations.base import Array, Index, Operation, Shape, alike, partial, placed, refuse

__all__ = ["AlongAxis", "Concat", "Interleave", "Rows", "Slice"]


class AlongAxis(Operation):
    """Entry m of the target's axis is entry index[m] of the axis of source which[m]. Along any axis but the last rows stay as they are."""

    __slots__ = ()
    axis: int

    @abstractmethod
    def places(self, sizes: Sequence[int]) -> tuple[Index, Index]:
        """(which, index) of each entry; sizes: the axis in each source."""

    @abstractmethod
    def fits(self, sizes: Sequence[int], tensor: str) -> None:
        """Raises InputError for sizes that `places` cannot take."""

    def shape(self, shapes: Sequence[Shape], tensor: str = "") -> Shape:
        """The sources' but for the axis. Raises InputError for an axis that is not there, and for sources that differ elsewhere."""
        if not shapes or not 0 <= self.axis < len(shapes[0]):
            raise refuse(tensor, "has no such axis", f"axis {self.axis}", [list(s) for s in shapes])
        a = self.axis
        alike([s[:a] + s[a + 1 :] if len(s) > a else s for s in shapes], tensor)
        sizes = [s[a] for s in shapes]
        self.fits(sizes, tensor)
        return (*shapes[0][:a], len(self.places(sizes)[0]), *shapes[0][a + 1 :])

    def keeps_rows(self, shapes: Sequence[Shape]) -> bool:
        """Along any axis but the last."""
        return self.axis < len(shapes[0]) - 1

    def _split(self, rows: Index, shapes: Sequence[Shape]) -> tuple[Index, Index]:
        """(which source, which of its rows) of each target row."""
        a, sizes = self.axis, [s[self.axis] for s in shapes]
        which, index = self.places(sizes)
        inner = math.prod(shapes[0][a + 1 : -1])
        outer, rest = np.divmod(rows, max(1, len(which) * inner))
        entry, offset = np.divmod(rest, max(1, inner))
        chosen = which[entry]
        return chosen, (outer * np.asarray(sizes, np.int64)[chosen] + index[entry]) * inner + offset

    def needs(self, rows: Index, shapes: Sequence[Shape]) -> tuple[Index, ...]:
        """Of each source those that are its; along the last axis the same rows of all."""
        if not self.keeps_rows(shapes):
            return (rows,) * len(shapes)
        which, found = self._split(rows, shapes)
        return (found,) if len(shapes) == 1 else tuple(found[which == j] for j in range(len(shapes)))

    def make(self, pieces: Sequence[Array], rows: Index, shapes: Sequence[Shape]) -> Array:
        """Rows at their places, or columns."""
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
    """Entry i of the axis is what entry order[i] was. order: int64."""

    order: Index
    axis: int = 0

    def fits(self, sizes: Sequence[int], tensor: str) -> None:
        """Raises InputError for an order that names other entries."""
        if len(sizes) != 1:
            raise refuse(tensor, "is made of one tensor", "1 source", f"{len(sizes)} sources")
        low, high = int(self.order.min(initial=0)), int(self.order.max(initial=-1))
        if low < 0 or high >= sizes[0]:
            raise refuse(tensor, "rows are not there", f"0 to {sizes[0] - 1}", f"{low} to {high}")

    def places(self, sizes: Sequence[int]) -> tuple[Index, Index]:
        """As `order` says."""
        return np.zeros(len(self.order), np.int64), self.order

    def reference(self, arrays: Sequence[Array]) -> Array:
        """numpy's take."""
        return np.take(arrays[0], self.order, self.axis)

    def inverse(self, shapes: Sequence[Shape]) -> tuple[Operation, ...]:
        """The order back, of a permutation."""
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
        """Raises InputError for entries that are not there."""
        if len(sizes) != 1:
            raise refuse(tensor, "is made of one tensor", "1 source", f"{len(sizes)} sources")
        if not (0 <= self.start <= self.stop <= sizes[0] and self.step >= 1):
            raise refuse(tensor, "rows are not there", f"0 to {sizes[0]}", f"{self.start} to {self.stop}")

    def places(self, sizes: Sequence[int]) -> tuple[Index, Index]:
        """An even run."""
        found = np.arange(self.start, self.stop, self.step, dtype=np.int64)
        return np.zeros(len(found), np.int64), found

    def reference(self, arrays: Sequence[Array]) -> Array:
        """numpy's slice."""
        return np.asarray(arrays[0][(slice(None),) * self.axis + (slice(self.start, self.stop, self.step),)])

    def inverse(self, shapes: Sequence[Shape]) -> tuple[Operation, ...]:
        """None: the other entries are not there."""
        raise partial(self)


@dataclass(frozen=True, slots=True)
class Concat(AlongAxis):
    """Tensors one behind the other along an axis."""

    axis: int = 0

    def fits(self, sizes: Sequence[int], tensor: str) -> None:
        """Any sizes."""

    def places(self, sizes: Sequence[int]) -> tuple[Index, Index]:
        """All of the first, then all of the second."""
        return np.repeat(np.arange(len(sizes)), sizes), np.concatenate([np.arange(n) for n in sizes])

    def reference(self, arrays: Sequence[Array]) -> Array:
        """numpy's concatenate."""
        return np.concatenate(arrays, self.axis)

    def inverse(self, shapes: Sequence[Shape]) -> tuple[Operation, ...]:
        """One slice for each."""
        ends = np.cumsum([s[self.axis] for s in shapes]).tolist()
        return tuple(Slice(end - s[self.axis], end, axis=self.axis) for end, s in zip(ends, shapes, strict=True))


@dataclass(frozen=True, slots=True)
class Interleave(AlongAxis):
    """Tensors of one shape whose entries along an axis alternate: first of each, second of each."""

    axis: int = 0

    def fits(self, sizes: Sequence[int], tensor: str) -> None:
        """Raises InputError for different sizes."""
        alike([(n,) for n in sizes], tensor)

    def places(self, sizes: Sequence[int]) -> tuple[Index, Index]:
        """In turn."""
        entries = np.arange(len(sizes) * sizes[0])
        return entries % len(sizes), entries // len(sizes)

    def reference(self, arrays: Sequence[Array]) -> Array:
        """Stacked behind the axis, then flat."""
        shape = arrays[0].shape
        return np.stack(arrays, self.axis + 1).reshape((*shape[: self.axis], -1, *shape[self.axis + 1 :]))

    def inverse(self, shapes: Sequence[Shape]) -> tuple[Operation, ...]:
        """Every n-th entry."""
        n, size = len(shapes), shapes[0][self.axis]
        return tuple(Slice(j, n * size, n, self.axis) for j in range(n))
