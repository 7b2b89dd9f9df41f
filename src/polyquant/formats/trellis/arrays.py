"""Parts stored differently from their codec's layout: indices with a header byte per tile, scales that are repaired."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyquant.errors import InputError
from polyquant.storage.source import Source
from polyquant.types import F32, U8, ArraySpec, StoredArray

__all__ = ["HeadedTiles", "RepairedScales"]

_PADDING = np.float32(1e-8)
"""Metal Marlin's scale for padding rows of a tile."""


@dataclass(frozen=True, slots=True)
class HeadedTiles:
    """A StoredArray of uint8 [a, b, n] tiles of n bytes, each after one header byte. spec: without the headers."""

    source: Source
    offset: int
    spec: ArraySpec

    def __post_init__(self) -> None:
        """Raise InputError if the tiles exceed the file."""
        if self.offset + self._stride() * self.spec.shape[0] > self.source.size:
            raise InputError(
                "data is outside the file", file=self.source.path, hint="the file is truncated: copy it again"
            )

    def _stride(self) -> int:
        """Bytes of one entry of the first axis."""
        _, b, n = self.spec.shape
        return b * (n + 1)

    def view(self) -> NDArray[Any]:
        """A read-only view of the file that skips the headers."""
        a, b, n = self.spec.shape
        tiles = self.source.view(self.offset, a * self._stride()).reshape(a, b, n + 1)[..., 1:]
        tiles.flags.writeable = False
        return tiles

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Tiles of entries [start, stop) of the first axis, without headers, in new memory. Raises InputError if the
        file is too short.
        """
        return np.ascontiguousarray(self._raw(start, stop)[..., 1:])

    def headers(self, start: int, stop: int) -> U8:
        """The header bytes of the same tiles, [stop - start, b]."""
        return self._raw(start, stop)[..., 0].copy()

    def _raw(self, start: int, stop: int) -> U8:
        a, b, n = self.spec.shape
        start, stop, _ = slice(start, stop).indices(a)
        out = np.empty((max(0, stop - start), b, n + 1), np.uint8)
        self.source.read_into(self.offset + start * self._stride(), out)
        return out


@dataclass(frozen=True, slots=True)
class RepairedScales:
    """A StoredArray of scales [G, N] as Metal Marlin's quantizer used them: the 16 outputs of a tile share their mean.

    divisor: 1.24371088 if the quantizer's grid was the integers, since the codec's grid includes that factor.
    """

    scales: StoredArray
    divisor: np.float32

    @property
    def spec(self) -> ArraySpec:
        """The stored shape and dtype."""
        return self.scales.spec

    def view(self) -> NDArray[Any]:
        """All scales, recomputed."""
        return self._repair(self.scales.view())

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Groups [start, stop), computed from positioned reads."""
        return self._repair(self.scales.read(start, stop))

    def _repair(self, stored: F32) -> F32:
        groups, n = stored.shape
        padded = np.full((groups, -(-n // 16) * 16), _PADDING, np.float32)
        padded[:, :n] = stored
        tiles = padded.reshape(groups, -1, 16)
        total = np.zeros(tiles.shape[:2], np.float32)
        for i in range(16):  # in the quantizer's order of addition
            total += tiles[..., i]
        mean = total / np.float32(16) / self.divisor
        return np.asarray(np.repeat(mean, 16, 1)[:, :n], np.float32, order="C")
