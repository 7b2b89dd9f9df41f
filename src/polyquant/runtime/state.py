"""The state that a layer keeps for a sequence: keys and values of every position, or states that each token updates.

A recurrent state belongs to one position and cannot be truncated: going back requires a copy (KVCache.mark) or
recomputation (Session.rewind).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from polyquant.errors import InputError
from polyquant.types import F32, Shape

__all__ = ["Arrays", "Recurrence", "State", "StateSpec"]

Arrays: TypeAlias = tuple[F32, ...]
Recurrence: TypeAlias = Callable[..., tuple[F32, Arrays]]
"""(states, *inputs [T, ...]) -> (outputs [T, ...], the states after these T tokens). It must not modify the states."""


@dataclass(frozen=True, slots=True)
class StateSpec:
    """The state of a layer.

    rows: (key heads, head size) stored per position, once for keys and once for values; None without attention. states:
    shapes of the arrays that each token updates, initially zero: last inputs of a convolution, a recurrent state.
    """

    rows: tuple[int, int] | None = None
    states: tuple[Shape, ...] = ()

    def __or__(self, other: StateSpec) -> StateSpec:
        """Combine the state of two parts of a layer. Raises ValueError if both keep the same kind."""
        if (self.rows and other.rows) or (self.states and other.states):
            raise ValueError("two parts of a layer keep the same kind of state")
        return StateSpec(self.rows or other.rows, self.states or other.states)


class State:
    """The recurrent states of one layer at the last written position, and at the one before, so that an interrupted
    step can be repeated.

    Arrays are never modified in place, so a reference is as good as a copy.
    """

    def __init__(self, shapes: Sequence[Shape]) -> None:
        self._shapes = tuple(shapes)
        self._held: dict[int, Arrays] = {}

    @property
    def arrays(self) -> Sequence[F32]:
        """All arrays held."""
        return [array for arrays in self._held.values() for array in arrays]

    def read(self, position: int) -> Arrays:
        """Return the states after `position` tokens. Raises InputError if it is not one of the last two positions."""
        if position == 0:
            return tuple(np.zeros(shape, np.float32) for shape in self._shapes)
        if position not in self._held:
            raise InputError("no recurrent state for this position", expected=sorted(self._held), found=position)
        return self._held[position]

    def write(self, start: int, end: int, arrays: Arrays) -> None:
        """Set the states after `end` tokens, computed from those after `start`."""
        before = {start: self._held[start]} if start in self._held else {}
        self._held = {**before, end: arrays}

    def fork(self) -> State:
        """Return an independent copy."""
        out = State(self._shapes)
        out._held = dict(self._held)
        return out

    def rewind(self, position: int, arrays: Arrays | None) -> None:
        """Keep only these states, which were read after `position` tokens; None for the start of the sequence."""
        self._held = {} if arrays is None else {position: arrays}
