"""Sequences of operations, and operations on each source before combining them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from polyquant.operations.base import SAME, Array, Index, Operation, Same, Shape, matrix, refuse

__all__ = ["Chain", "Joined", "chain", "steps_of"]


def chain(*steps: Operation) -> Operation:
    """Return the operations in sequence, simplified."""
    flat = [s for step in steps for s in steps_of(step) if not isinstance(s, Same)]
    return Chain(tuple(flat)) if len(flat) > 1 else flat[0] if flat else SAME


def steps_of(op: Operation) -> tuple[Operation, ...]:
    """Return the operations of which `chain` makes this one: none for the unchanged source."""
    return op.steps if isinstance(op, Chain) else () if isinstance(op, Same) else (op,)


@dataclass(frozen=True, slots=True)
class Chain(Operation):
    """Operations in sequence: the first takes the sources, each other one the previous result."""

    steps: tuple[Operation, ...]

    @property
    def moves(self) -> bool:
        """True if all steps only move values."""
        return all(step.moves for step in self.steps)

    def _inputs(self, shapes: Sequence[Shape], tensor: str = "") -> list[Sequence[Shape]]:
        """Return the input shapes of each step, and the shape of the result."""
        inputs = [shapes]
        for step in self.steps:
            inputs.append((step.shape(inputs[-1], tensor),))
        return inputs

    def shape(self, shapes: Sequence[Shape], tensor: str = "") -> Shape:
        """Return the shape of the last step."""
        return self._inputs(shapes, tensor)[-1][0]

    def keeps_rows(self, shapes: Sequence[Shape]) -> bool:
        """True if all steps keep rows."""
        return all(step.keeps_rows(inputs) for step, inputs in zip(self.steps, self._inputs(shapes), strict=False))

    def together(self, shapes: Sequence[Shape]) -> int:
        """Return one row; or one matrix if every step keeps matrices separate; or all rows."""
        inputs = self._inputs(shapes)
        if all(step.together(taken) == 1 for step, taken in zip(self.steps, inputs, strict=False)):
            return 1
        target = inputs[-1][0]
        stacked = all(len(results[0]) > 2 for results in inputs[1:])
        return max(1, target[-2] if stacked else matrix(target)[0])

    def _rows(self, rows: Index, inputs: Sequence[Sequence[Shape]]) -> list[tuple[Index, ...]]:
        """Return the rows required from the input of each step, from the first step on, and from the result."""
        required: list[tuple[Index, ...]] = [(rows,)]
        for step, shapes in zip(reversed(self.steps), reversed(inputs[:-1]), strict=True):
            required.append(step.needs(required[-1][0], shapes))
        return required[::-1]

    def needs(self, rows: Index, shapes: Sequence[Shape]) -> tuple[Index, ...]:
        """Propagate from the last step to the first."""
        return self._rows(rows, self._inputs(shapes))[0]

    def make(self, pieces: Sequence[Array], rows: Index, shapes: Sequence[Shape]) -> Array:
        """Apply from the first step to the last."""
        inputs = self._inputs(shapes)
        result = pieces
        for step, taken, needed in zip(self.steps, inputs, self._rows(rows, inputs)[1:], strict=False):
            result = (step.make(result, needed[0], taken),)
        return result[0]

    def reference(self, arrays: Sequence[Array]) -> Array:
        """Apply the steps to whole arrays."""
        for step in self.steps:
            arrays = (step.reference(arrays),)
        return arrays[0]

    def inverse(self, shapes: Sequence[Shape]) -> tuple[Operation, ...]:
        """Return the inverses from the last to the first."""
        inputs = self._inputs(shapes)
        later = [step.inverse(taken)[0] for step, taken in zip(self.steps[1:], inputs[1:], strict=False)]
        return tuple(chain(*later[::-1], first) for first in self.steps[0].inverse(shapes))


@dataclass(frozen=True, slots=True)
class Joined(Operation):
    """Apply each[j] to source j, then `by` to the results."""

    each: tuple[Operation, ...]
    by: Operation

    @property
    def moves(self) -> bool:
        """True if all only move values."""
        return self.by.moves and all(op.moves for op in self.each)

    def _results(self, shapes: Sequence[Shape], tensor: str = "") -> tuple[Shape, ...]:
        if len(shapes) != len(self.each):
            raise refuse(tensor, "has a different number of source tensors", len(self.each), len(shapes))
        return tuple(op.shape((s,), tensor) for op, s in zip(self.each, shapes, strict=True))

    def shape(self, shapes: Sequence[Shape], tensor: str = "") -> Shape:
        """Return the shape of `by`."""
        return self.by.shape(self._results(shapes, tensor), tensor)

    def keeps_rows(self, shapes: Sequence[Shape]) -> bool:
        """True if all keep rows."""
        each = all(op.keeps_rows((s,)) for op, s in zip(self.each, shapes, strict=True))
        return each and self.by.keeps_rows(self._results(shapes))

    def together(self, shapes: Sequence[Shape]) -> int:
        """Return one row; or one matrix of a stack, or all rows."""
        if self.by.together(results := self._results(shapes)) == 1 and all(
            op.together((s,)) == 1 for op, s in zip(self.each, shapes, strict=True)
        ):
            return 1
        target = self.by.shape(results)
        return max(1, target[-2] if len(target) > 2 else matrix(target)[0])

    def needs(self, rows: Index, shapes: Sequence[Shape]) -> tuple[Index, ...]:
        """Return the rows each operation needs for the rows that `by` needs."""
        needed = self.by.needs(rows, self._results(shapes))
        return tuple(op.needs(r, (s,))[0] for op, r, s in zip(self.each, needed, shapes, strict=True))

    def make(self, pieces: Sequence[Array], rows: Index, shapes: Sequence[Shape]) -> Array:
        """Apply each, then combine."""
        result = self._results(shapes)
        needed = self.by.needs(rows, result)
        results = [op.make((p,), r, (s,)) for op, p, r, s in zip(self.each, pieces, needed, shapes, strict=True)]
        return self.by.make(results, rows, result)

    def reference(self, arrays: Sequence[Array]) -> Array:
        """Apply the operations to whole arrays."""
        return self.by.reference([op.reference((a,)) for op, a in zip(self.each, arrays, strict=True)])

    def inverse(self, shapes: Sequence[Shape]) -> tuple[Operation, ...]:
        """Invert `by`, then each."""
        cut = self.by.inverse(self._results(shapes))
        return tuple(chain(c, op.inverse((s,))[0]) for c, op, s in zip(cut, self.each, shapes, strict=True))
