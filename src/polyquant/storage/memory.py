"""An array in memory as a part of a weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyquant.types import ArraySpec

__all__ = ["MemoryArray"]


@dataclass(frozen=True, slots=True, eq=False)
class MemoryArray:
    """A types.StoredArray of a C-contiguous array."""

    array: NDArray[Any]

    @property
    def spec(self) -> ArraySpec:
        """Shape and dtype."""
        return ArraySpec(self.array.shape, self.array.dtype)

    def view(self) -> NDArray[Any]:
        """The array, read-only."""
        view = self.array.view()
        view.flags.writeable = False
        return view

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """A copy of entries [start, stop) of the first axis."""
        return np.array(self.array[start:stop])
