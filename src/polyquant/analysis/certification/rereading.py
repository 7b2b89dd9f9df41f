"""Read a tensor's bytes in another way: as another type of the same size, in the other byte order, in a
different layout of ternary codes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyquant.analysis.certification.cause import Cause
from polyquant.analysis.certification.matching import cosines
from polyquant.analysis.side import Reader, Side
from polyquant.analysis.statistics import median
from polyquant.capabilities import Swappable
from polyquant.errors import PolyquantError
from polyquant.registry import CODECS, codec
from polyquant.types import F32, ArraySpec, Floats, StoredArray, Ternary, Weight, as_matrix

__all__ = ["misread"]

_MOST = 1 << 26
"""Weights of a tensor that is read in other ways."""


@dataclass(frozen=True, slots=True, eq=False)
class _Swapped:
    """A stored array with the bytes of its items, or of the fields of its blocks, reversed."""

    array: StoredArray
    fields: tuple[tuple[int, int, int], ...]
    block: int

    @property
    def spec(self) -> ArraySpec:
        """Shape and dtype."""
        return self.array.spec

    def view(self) -> NDArray[Any]:
        """A swapped copy."""
        return self._of(np.array(self.array.view()))

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Entries [start, stop), swapped."""
        return self._of(self.array.read(start, stop))

    def _of(self, x: NDArray[Any]) -> NDArray[Any]:
        blocks = np.ascontiguousarray(x).reshape(-1).view(np.uint8).reshape(-1, self.block)
        for offset, size, count in self.fields:
            field = blocks[:, offset : offset + size * count].reshape(-1, count, size)
            blocks[:, offset : offset + size * count] = field[:, :, ::-1].reshape(len(blocks), -1)
        return blocks.reshape(-1).view(x.dtype).reshape(x.shape)


def misread(side: Side, expected: F32, rows: list[int], least: float) -> Cause | None:
    """The other way to read these rows that gives the expected values; None if there is none."""
    if sum(w.nbytes for w in side.weights) > _MOST:
        return None
    for cause, other in _readings(side):
        try:
            found = Reader(other).picked(rows)
        except (PolyquantError, ValueError):
            continue
        if np.isfinite(found).all() and median(cosines(found, expected)) >= least and _sized(found, expected):
            return cause
    return _symbols(side, expected, rows, least)


def _sized(found: F32, expected: F32) -> bool:
    ratio = np.linalg.norm(found) / max(float(np.linalg.norm(expected)), 1e-30)
    return bool(0.5 < ratio < 2)


def _readings(side: Side) -> Iterator[tuple[Cause, Side]]:
    first = side.weights[0]
    swapped = tuple(_swapped(w) for w in side.weights)
    if all(w is not None for w in swapped):
        yield (
            Cause("CER025", f"the bytes of {first.codec} are in the other byte order"),
            replace(side, weights=tuple(w for w in swapped if w is not None)),
        )
    specs = {part: (a.spec.shape, a.spec.dtype.itemsize) for part, a in first.arrays.items()}
    for name in CODECS:
        other = codec(name)
        if other.form is not first.codec.form or other.form not in (Floats, Ternary) or name == first.codec.name:
            continue
        try:
            same = {p: (s.shape, s.dtype.itemsize) for p, s in other.specs(as_matrix(first.shape)).items()} == specs
        except PolyquantError:
            continue
        if same:
            code = "CER025" if other.form is Floats else "CER026"
            cause = Cause(code, f"declared as {first.codec}, but the values are right when read as {name}")
            yield cause, replace(side, weights=tuple(_as(w, name) for w in side.weights))


def _as(weight: Weight, name: str) -> Weight:
    """A weight whose bytes are read by another codec."""
    other = codec(name)
    specs = other.specs(as_matrix(weight.shape))
    arrays = {part: _Viewed(array, specs[part].dtype) for part, array in weight.arrays.items()}
    return Weight(weight.name, weight.shape, other, arrays)


@dataclass(frozen=True, slots=True, eq=False)
class _Viewed:
    """A stored array read with a different dtype of the same size."""

    array: StoredArray
    dtype: np.dtype[Any]

    @property
    def spec(self) -> ArraySpec:
        """Shape and dtype."""
        return ArraySpec(self.array.spec.shape, self.dtype)

    def view(self) -> NDArray[Any]:
        """The bytes as this dtype."""
        return np.array(self.array.view()).view(self.dtype)

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Entries [start, stop) as this dtype."""
        return self.array.read(start, stop).view(self.dtype)


def _swapped(weight: Weight) -> Weight | None:
    """The weight in the other byte order; None if it has no multi-byte fields."""
    fields: tuple[tuple[int, int, int], ...] = ()
    block, count = 0, as_matrix(weight.shape)[0] * as_matrix(weight.shape)[1]
    if weight.codec.form is Floats:
        block = weight.nbytes // max(1, count)
        fields = ((0, block, 1),)
        if block < 2:
            return None
    else:
        if not isinstance(weight.codec, Swappable) or not weight.codec.fields:
            return None
        fields = tuple(weight.codec.fields)
        block = weight.nbytes * weight.codec.granule[1] // max(1, count)
    return replace(weight, arrays={part: _Swapped(array, fields, block) for part, array in weight.arrays.items()})


def _symbols(side: Side, expected: F32, rows: list[int], least: float) -> Cause | None:
    """The order of the ternary symbols that gives the expected values."""
    if not side.is_ternary:
        return None
    signs = np.sign(Reader(side).picked(rows))
    usual = (-1, 0, 1)
    for order in permutations(usual):
        values = np.choose((signs + 1).astype(np.int64), order).astype(np.float32)
        if order not in (usual, usual[::-1]) and median(cosines(values, expected)) >= least:
            shown = ", ".join(f"{a:+d} for {b:+d}" for a, b in zip(order, usual, strict=True) if a != b)
            return Cause("CER026", f"the symbols of the codes have another order: {shown}")
    return None
