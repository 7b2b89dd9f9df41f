"""Operations one after the other, and operations on each source before all are joined."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from polyquant.operations.base import SAME, Array, Index, Operation, Same, Shape, matrix, refuse

__all__ = ["Chain", "Joined", "chain"]


def chain(*steps: Operation) -> Operation:
    """One after the other, as short as it can be said."""
    flat = [
        s for step in steps for s in (step.steps if isinstance(step, Chain) else (step,)) if not isinstance(s, Same)
    ]
    return Chain(tuple(flat)) if len(flat) > 1 else flat[0] if flat else SAME


@dataclass(frozen=True, slots=True)
class Chain(Operation):
    """One operation after the other: the first takes the sources, every other what the one before it gives."""

    steps: tuple[Operation, ...]

    @property
    def moves(self) -> bool:
        """True if all do."""
        return all(step.moves for step in self.steps)

    def _inputs(self, shapes: Sequence[Shape], tensor: str = "") -> list[Sequence[Shape]]:
        """The shapes that each step takes, and the result's."""
        found = [shapes]
        for step in self.steps:
            found.append((step.shape(found[-1], tensor),))
        return found

    def shape(self, shapes: Sequence[Shape], tensor: str = "") -> Shape:
        """That of the last."""
        return self._inputs(shapes, tensor)[-1][0]

    def keeps_rows(self, shapes: Sequence[Shape]) -> bool:
        """True if all do."""
        return all(step.keeps_rows(taken) for step, taken in zip(self.steps, self._inputs(shapes), strict=False))

    def together(self, shapes: Sequence[Shape]) -> int:
        """One row; else one matrix where every step leaves matrices apart; else all."""
        inputs = self._inputs(shapes)
        if all(step.together(taken) == 1 for step, taken in zip(self.steps, inputs, strict=False)):
            return 1
        target = inputs[-1][0]
        stacked = all(len(made[0]) > 2 for made in inputs[1:])
        return max(1, target[-2] if stacked else matrix(target)[0])

    def _rows(self, rows: Index, inputs: Sequence[Sequence[Shape]]) -> list[tuple[Index, ...]]:
        """What each step is asked for, from the first on; of the first, what it needs stands before."""
        found: list[tuple[Index, ...]] = [(rows,)]
        for step, taken in zip(reversed(self.steps), reversed(inputs[:-1]), strict=True):
            found.append(step.needs(found[-1][0], taken))
        return found[::-1]

    def needs(self, rows: Index, shapes: Sequence[Shape]) -> tuple[Index, ...]:
        """From the last step back to the first."""
        return self._rows(rows, self._inputs(shapes))[0]

    def make(self, pieces: Sequence[Array], rows: Index, shapes: Sequence[Shape]) -> Array:
        """From the first step to the last."""
        inputs = self._inputs(shapes)
        made = pieces
        for step, taken, asked in zip(self.steps, inputs, self._rows(rows, inputs)[1:], strict=False):
            made = (step.make(made, asked[0], taken),)
        return made[0]

    def reference(self, arrays: Sequence[Array]) -> Array:
        """The same of whole arrays."""
        for step in self.steps:
            arrays = (step.reference(arrays),)
        return arrays[0]

    def inverse(self, shapes: Sequence[Shape]) -> tuple[Operation, ...]:
        """The inverses from the last to the first."""
        inputs = self._inputs(shapes)
        later = [step.inverse(taken)[0] for step, taken in zip(self.steps[1:], inputs[1:], strict=False)]
        return tuple(chain(*later[::-1], first) for first in self.steps[0].inverse(shapes))


@dataclass(frozen=True, slots=True)
class Joined(Operation):
    """each[j] of source j, and then `by` of them all."""

    each: tuple[Operation, ...]
    by: Operation

    @property
    def moves(self) -> bool:
        """True if all do."""
        return self.by.moves and all(op.moves for op in self.each)

    def _made(self, shapes: Sequence[Shape], tensor: str = "") -> tuple[Shape, ...]:
        if len(shapes) != len(self.each):
            raise refuse(tensor, "is made of another number of tensors", len(self.each), len(shapes))
        return tuple(op.shape((s,), tensor) for op, s in zip(self.each, shapes, strict=True))

    def shape(self, shapes: Sequence[Shape], tensor: str = "") -> Shape:
        """That of `by`."""
        return self.by.shape(self._made(shapes, tensor), tensor)

    def keeps_rows(self, shapes: Sequence[Shape]) -> bool:
        """True if all do."""
        each = all(op.keeps_rows((s,)) for op, s in zip(self.each, shapes, strict=True))
        return each and self.by.keeps_rows(self._made(shapes))

    def together(self, shapes: Sequence[Shape]) -> int:
        """One row; else one matrix of a stack, or all."""
        if self.by.together(made := self._made(shapes)) == 1 and all(
            op.together((s,)) == 1 for op, s in zip(self.each, shapes, strict=True)
        ):
            return 1
        target = self.by.shape(made)
        return max(1, target[-2] if len(target) > 2 else matrix(target)[0])

    def needs(self, rows: Index, shapes: Sequence[Shape]) -> tuple[Index, ...]:
        """What each needs for what `by` needs."""
        asked = self.by.needs(rows, self._made(shapes))
        return tuple(op.needs(r, (s,))[0] for op, r, s in zip(self.each, asked, shapes, strict=True))

    def make(self, pieces: Sequence[Array], rows: Index, shapes: Sequence[Shape]) -> Array:
        """Each, then all."""
        made = self._made(shapes)
        asked = self.by.needs(rows, made)
        found = [op.make((p,), r, (s,)) for op, p, r, s in zip(self.each, pieces, asked, shapes, strict=True)]
        return self.by.make(found, rows, made)

    def reference(self, arrays: Sequence[Array]) -> Array:
        """The same of whole arrays."""
        return self.by.reference([op.reference((a,)) for op, a in zip(self.each, arrays, strict=True)])

    def inverse(self, shapes: Sequence[Shape]) -> tuple[Operation, ...]:
        """Cut apart, then each back."""
        cut = self.by.inverse(self._made(shapes))
        return tuple(chain(c, op.inverse((s,))[0]) for c, op, s in zip(cut, self.each, shapes, strict=True))
