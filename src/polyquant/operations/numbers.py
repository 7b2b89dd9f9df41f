"""Elementwise changes of values, in float32 before any rounding: constants, factors, the decay of state spaces."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from polyquant.errors import UnsupportedError
from polyquant.operations.base import Array, Index, Operation, Shape, refuse, single

__all__ = ["AddConstant", "MinusExp", "MinusLog", "Multiply", "MultiplyRows"]


class _Elementwise(Operation):
    """An elementwise function. Its inverse rounds again."""

    __slots__ = ()

    @abstractmethod
    def of(self, x: Array) -> Array:
        """Apply the function: float32 -> float32."""

    @abstractmethod
    def back(self) -> Operation:
        """Return the inverse operation. Raises UnsupportedError if there is none."""

    @property
    def moves(self) -> bool:
        """False: values change."""
        return False

    def shape(self, shapes: Sequence[Shape], tensor: str = "") -> Shape:
        """Return the source's shape."""
        return single(shapes, tensor)

    def keeps_rows(self, shapes: Sequence[Shape]) -> bool:
        """False."""
        return False

    def needs(self, rows: Index, shapes: Sequence[Shape]) -> tuple[Index, ...]:
        """Return these rows."""
        return (rows,)

    def make(self, pieces: Sequence[Array], rows: Index, shapes: Sequence[Shape]) -> Array:
        """Apply the function to the piece."""
        return self.reference(pieces)

    def reference(self, arrays: Sequence[Array]) -> Array:
        """Apply the function to the array, as float32."""
        return np.asarray(self.of(np.asarray(arrays[0], np.float32)), np.float32)

    def inverse(self, shapes: Sequence[Shape]) -> tuple[Operation, ...]:
        """Return the inverse function."""
        return (self.back(),)


@dataclass(frozen=True, slots=True)
class AddConstant(_Elementwise):
    """x + value: norms stored as weight - 1 in one format and as weight in the other."""

    value: float

    def of(self, x: Array) -> Array:
        """Return x + value."""
        return np.asarray(x + np.float32(self.value))

    def back(self) -> Operation:
        """Return x - value."""
        return AddConstant(-self.value)


@dataclass(frozen=True, slots=True)
class Multiply(_Elementwise):
    """x * value: multipliers of the configuration that are folded into the weights elsewhere."""

    value: float

    def of(self, x: Array) -> Array:
        """Return x * value."""
        return np.asarray(x * np.float32(self.value))

    def back(self) -> Operation:
        """Return x / value. Raises UnsupportedError for zero."""
        if self.value == 0:
            raise UnsupportedError("multiplication by zero cannot be inverted")
        return Multiply(1 / self.value)


@dataclass(frozen=True, slots=True)
class MultiplyRows(Operation):
    """Multiply row i of a matrix by the factor of its section: sections are consecutive (rows, factor) and cover all
    rows."""

    sections: tuple[tuple[int, float], ...]

    @property
    def moves(self) -> bool:
        """False: values change."""
        return False

    @property
    def _factors(self) -> Array:
        return np.repeat(np.array([f for _, f in self.sections], np.float32), [n for n, _ in self.sections])

    def shape(self, shapes: Sequence[Shape], tensor: str = "") -> Shape:
        """Return the source's shape. Raises InputError if the row count differs."""
        shape, expected = single(shapes, tensor), sum(n for n, _ in self.sections)
        if len(shape) != 2 or shape[0] != expected:
            raise refuse(tensor, "rows do not fit the sections of the configuration", f"{expected} rows", list(shape))
        return shape

    def keeps_rows(self, shapes: Sequence[Shape]) -> bool:
        """False."""
        return False

    def needs(self, rows: Index, shapes: Sequence[Shape]) -> tuple[Index, ...]:
        """Return these rows."""
        return (rows,)

    def make(self, pieces: Sequence[Array], rows: Index, shapes: Sequence[Shape]) -> Array:
        """Multiply each row by its factor."""
        return np.asarray(np.asarray(pieces[0], np.float32) * self._factors[rows, None])

    def reference(self, arrays: Sequence[Array]) -> Array:
        """Multiply the array, as float32, by a column of factors."""
        return np.asarray(np.asarray(arrays[0], np.float32) * self._factors[:, None])

    def inverse(self, shapes: Sequence[Shape]) -> tuple[Operation, ...]:
        """Divide each row. Raises UnsupportedError for a factor of zero."""
        if any(factor == 0 for _, factor in self.sections):
            raise UnsupportedError("multiplication by zero cannot be inverted")
        return (MultiplyRows(tuple((n, 1 / factor) for n, factor in self.sections)),)


@dataclass(frozen=True, slots=True)
class MinusExp(_Elementwise):
    """-exp(x): a state space's decay `A` from its `A_log`.

    Rounded from float64, which matches torch's result; numpy's float32 exp is off by an ulp.
    """

    def of(self, x: Array) -> Array:
        """Return -exp(x)."""
        with np.errstate(over="ignore"):
            return np.asarray(-np.exp(x, dtype=np.float64), np.float32)

    def back(self) -> Operation:
        """Return log(-x)."""
        return MinusLog()


@dataclass(frozen=True, slots=True)
class MinusLog(_Elementwise):
    """log(-x): the inverse of MinusExp; NaN for values that are not a decay."""

    def of(self, x: Array) -> Array:
        """Return log(-x)."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray(np.log(-x, dtype=np.float64), np.float32)

    def back(self) -> Operation:
        """Return -exp(x)."""
        return MinusExp()
