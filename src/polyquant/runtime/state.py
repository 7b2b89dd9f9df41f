"""What a layer keeps of a text: rows of keys and values at every position, or states that each token changes.

A state belongs to one position and cannot be cut back: whoever goes back needs a copy from there (KVCache.mark), or computes the text anew (Session.rewind).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from polyquant.errors import InputError
from polyquant.types import F32, Shape

__all__ = ["Arrays", "Keeps", "State"]

Arrays: TypeAlias = tuple[F32, ...]


@dataclass(frozen=True, slots=True)
class Keeps:
    """rows: (heads of keys, numbers of each) that every position leaves, once as keys and once as values; None for no attention. states: shapes of the
    arrays that each token changes, zeros before the first: the last inputs of a convolution, a recurrent state."""

    rows: tuple[int, int] | None = None
    states: tuple[Shape, ...] = ()

    def __or__(self, other: Keeps) -> Keeps:
        """Both parts' of one layer. Raises ValueError where both keep the same kind."""
        if (self.rows and other.rows) or (self.states and other.states):
            raise ValueError("two parts of one layer keep the same")
        return Keeps(self.rows or other.rows, self.states or other.states)


class State:
    """The states of one layer at the position that was written last, and at the one that they were made of: a step that was broken off half way can be
    taken again. Arrays are never changed, so that whoever holds some has a copy."""

    def __init__(self, shapes: Sequence[Shape]) -> None:
        self._shapes = tuple(shapes)
        self._held: dict[int, Arrays] = {}

    @property
    def arrays(self) -> Sequence[F32]:
        """All that it holds."""
        return [array for arrays in self._held.values() for array in arrays]

    def read(self, position: int) -> Arrays:
        """After `position` tokens. Raises InputError for another position than the last two."""
        if position == 0:
            return tuple(np.zeros(shape, np.float32) for shape in self._shapes)
        if position not in self._held:
            raise InputError("a recurrent state of another position", expected=sorted(self._held), found=position)
        return self._held[position]

    def write(self, start: int, end: int, arrays: Arrays) -> None:
        """After `end` tokens, made of those after `start`."""
        before = {start: self._held[start]} if start in self._held else {}
        self._held = {**before, end: arrays}

    def go_back(self, position: int, arrays: Arrays | None) -> None:
        """Forget all but these, which were read after `position` tokens; None for the beginning."""
        self._held = {} if arrays is None else {position: arrays}
