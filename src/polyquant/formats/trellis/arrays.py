"""Parts that do not lie in the file as their codec wants them: indices with a header byte in each tile, scales that are mended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyquant.errors import InputError
from polyquant.storage.source import Source
from polyquant.types import F32, U8, ArraySpec, StoredArray

__all__ = ["HeadedTiles", "MendedScales"]

_PADDING = np.float32(1e-8)
"""What Metal Marlin's quantizer takes for the scale of a row that only fills a tile."""


@dataclass(frozen=True, slots=True)
class HeadedTiles:
    """uint8 [a, b, n] tiles of n bytes, each behind one header byte: a StoredArray. spec: without the headers."""

    source: Source
    offset: int
    spec: ArraySpec

    def __post_init__(self) -> None:
        """Raises InputError if the tiles do not lie inside the file."""
        if self.offset + self._stride() * self.spec.shape[0] > self.source.size:
            raise InputError(
                "data lies outside the file", file=self.source.path, hint="the file is truncated: copy it again"
            )

    def _stride(self) -> int:
        """Bytes of one entry of the first axis."""
        _, b, n = self.spec.shape
        return b * (n + 1)

    def view(self) -> NDArray[Any]:
        """A read-only map of the file that skips the headers."""
        a, b, n = self.spec.shape
        found = self.source.map()[self.offset : self.offset + a * self._stride()].reshape(a, b, n + 1)[..., 1:]
        found.flags.writeable = False
        return found

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Tiles of entries [start, stop) of the first axis, in fresh memory without gaps. Raises InputError if the file ends before."""
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
class MendedScales:
    """Scales [G, N] as Metal Marlin's quantizer used them, a StoredArray: the 16 outputs of a tile share the mean of theirs.

    divisor: 1.24371088 where the quantizer's grid was the integers, for the grid of the codec has that factor.
    """

    scales: StoredArray
    divisor: np.float32

    @property
    def spec(self) -> ArraySpec:
        """As stored."""
        return self.scales.spec

    def view(self) -> NDArray[Any]:
        """All, computed anew."""
        return self._mend(self.scales.view())

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Groups [start, stop), computed from positioned reads."""
        return self._mend(self.scales.read(start, stop))

    def _mend(self, stored: F32) -> F32:
        groups, n = stored.shape
        padded = np.full((groups, -(-n // 16) * 16), _PADDING, np.float32)
        padded[:, :n] = stored
        tiles = padded.reshape(groups, -1, 16)
        total = np.zeros(tiles.shape[:2], np.float32)
        for i in range(16):  # one after the other, as the quantizer adds them
            total += tiles[..., i]
        mean = total / np.float32(16) / self.divisor
        return np.asarray(np.repeat(mean, 16, 1)[:, :n], np.float32, order="C")
