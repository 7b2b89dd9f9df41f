"""What changes each number by itself, in float32 before anything is rounded: constants added, factors, the decay of state spaces."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from polyquant.errors import UnsupportedError
from polyquant.operations.base import Array, Index, Operation, Shape, refuse, single

__all__ = ["AddConstant", "MinusExp", "MinusLog", "Multiply", "MultiplyRows"]


class _EachNumber(Operation):
    """A function of each number. The way back rounds once more."""

    __slots__ = ()

    @abstractmethod
    def of(self, x: Array) -> Array:
        """float32 -> float32."""

    @abstractmethod
    def back(self) -> Operation:
        """The inverse function. Raises UnsupportedError if there is none."""

    @property
    def moves(self) -> bool:
        """False: numbers change."""
        return False

    def shape(self, shapes: Sequence[Shape], tensor: str = "") -> Shape:
        """That of the source."""
        return single(shapes, tensor)

    def keeps_rows(self, shapes: Sequence[Shape]) -> bool:
        """No."""
        return False

    def needs(self, rows: Index, shapes: Sequence[Shape]) -> tuple[Index, ...]:
        """These."""
        return (rows,)

    def make(self, pieces: Sequence[Array], rows: Index, shapes: Sequence[Shape]) -> Array:
        """The function of the piece."""
        return self.reference(pieces)

    def reference(self, arrays: Sequence[Array]) -> Array:
        """The function of the array, as float32."""
        return np.asarray(self.of(np.asarray(arrays[0], np.float32)), np.float32)

    def inverse(self, shapes: Sequence[Shape]) -> tuple[Operation, ...]:
        """The inverse function."""
        return (self.back(),)


@dataclass(frozen=True, slots=True)
class AddConstant(_EachNumber):
    """x + value: norms that one program keeps as weight - 1, the other as weight."""

    value: float

    def of(self, x: Array) -> Array:
        """x + value."""
        return np.asarray(x + np.float32(self.value))

    def back(self) -> Operation:
        """x - value."""
        return AddConstant(-self.value)


@dataclass(frozen=True, slots=True)
class Multiply(_EachNumber):
    """x * value: multipliers of the configuration that live in the weights elsewhere."""

    value: float

    def of(self, x: Array) -> Array:
        """x * value."""
        return np.asarray(x * np.float32(self.value))

    def back(self) -> Operation:
        """x / value."""
        if self.value == 0:
            raise UnsupportedError("what was multiplied by zero does not come back")
        return Multiply(1 / self.value)


@dataclass(frozen=True, slots=True)
class MultiplyRows(Operation):
    """Row i of a matrix times the factor of its section: sections are (rows, factor), one behind the other, and hold all rows."""

    sections: tuple[tuple[int, float], ...]

    @property
    def moves(self) -> bool:
        """False: numbers change."""
        return False

    @property
    def _factors(self) -> Array:
        return np.repeat(np.array([f for _, f in self.sections], np.float32), [n for n, _ in self.sections])

    def shape(self, shapes: Sequence[Shape], tensor: str = "") -> Shape:
        """That of the source. Raises InputError for another number of rows."""
        found, wanted = single(shapes, tensor), sum(n for n, _ in self.sections)
        if len(found) != 2 or found[0] != wanted:
            raise refuse(tensor, "rows do not fit the sections of the configuration", f"{wanted} rows", list(found))
        return found

    def keeps_rows(self, shapes: Sequence[Shape]) -> bool:
        """No."""
        return False

    def needs(self, rows: Index, shapes: Sequence[Shape]) -> tuple[Index, ...]:
        """These."""
        return (rows,)

    def make(self, pieces: Sequence[Array], rows: Index, shapes: Sequence[Shape]) -> Array:
        """Each row times its factor."""
        return np.asarray(np.asarray(pieces[0], np.float32) * self._factors[rows, None])

    def reference(self, arrays: Sequence[Array]) -> Array:
        """The array, as float32, times a column of factors."""
        return np.asarray(np.asarray(arrays[0], np.float32) * self._factors[:, None])

    def inverse(self, shapes: Sequence[Shape]) -> tuple[Operation, ...]:
        """Each row divided. Raises UnsupportedError for a factor of zero."""
        if any(factor == 0 for _, factor in self.sections):
            raise UnsupportedError("what was multiplied by zero does not come back")
        return (MultiplyRows(tuple((n, 1 / factor) for n, factor in self.sections)),)


@dataclass(frozen=True, slots=True)
class MinusExp(_EachNumber):
    """-exp(x): a state space's decay `A` of its `A_log`. Rounded from float64, as torch's own comes out; numpy's float32 exp is an ulp off."""

    def of(self, x: Array) -> Array:
        """-exp(x)."""
        with np.errstate(over="ignore"):
            return np.asarray(-np.exp(x, dtype=np.float64), np.float32)

    def back(self) -> Operation:
        """log(-x)."""
        return MinusLog()


@dataclass(frozen=True, slots=True)
class MinusLog(_EachNumber):
    """log(-x): the inverse of MinusExp; NaN for what no decay is."""

    def of(self, x: Array) -> Array:
        """log(-x)."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray(np.log(-x, dtype=np.float64), np.float32)

    def back(self) -> Operation:
        """-exp(x)."""
        return MinusExp()
