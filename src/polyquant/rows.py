"""Rows of a tensor that is made of others, read from their files a block at a time; and one matrix of a stack as a weight of its own.

Memory holds the rows of a block: of sources whose codecs cannot be read by rows (I2_S, trellis codes) one whole source.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyquant.errors import InputError, UnsupportedError
from polyquant.operations import Index, Operation, Same
from polyquant.types import F32, ArraySpec, Parts, StoredArray, Weight, as_matrix

__all__ = ["expert", "experts", "float_rows", "stored_rows", "whole_floats"]

_GAP = 1 << 16
"""Bytes between two rows that are read rather than skipped."""


# ---------------------------------------------------------------- blocks of rows


def stored_rows(weights: Sequence[Weight], op: Operation, rows: slice) -> Parts:
    """Parts of the target's rows [a, b), for an operation that keeps rows and sources of one codec that is read by rows."""
    if isinstance(op, Same):
        return weights[0].read(rows)
    index, shapes = np.arange(rows.start, rows.stop), [w.shape for w in weights]
    found = [_picked(w, wanted) for w, wanted in zip(weights, op.needs(index, shapes), strict=True)]
    return {part: op.make([f[part] for f in found], index, shapes) for part in found[0]}


def float_rows(weights: Sequence[Weight], op: Operation, rows: slice) -> F32:
    """The target's rows [a, b) as float32 [b - a, K]."""
    index, shapes = np.arange(rows.start, rows.stop), [w.shape for w in weights]
    found = [_decoded(w, wanted) for w, wanted in zip(weights, op.needs(index, shapes), strict=True)]
    return np.asarray(op.make(found, index, shapes), np.float32)


def whole_floats(weights: Sequence[Weight], op: Operation) -> F32:
    """The target as float32 of its shape."""
    return np.asarray(op.reference([w.codec.dequantize(w.read(), w.shape) for w in weights]), np.float32)


def _decoded(weight: Weight, rows: Index) -> F32:
    """Rows of one source as float32 [n, K]."""
    k = as_matrix(weight.shape)[1]
    if not len(rows):
        return np.empty((0, k), np.float32)
    if weight.codec.row_sliced:
        return weight.codec.dequantize(_picked(weight, rows), (len(rows), k))
    return weight.codec.dequantize(weight.read(), as_matrix(weight.shape))[rows]


def _picked(weight: Weight, rows: Index) -> dict[str, NDArray[Any]]:
    """Parts of these rows, in this order, each read once; near ones with what lies between them."""
    if not len(rows):
        return weight.read(slice(0, 0))
    low, high = int(rows.min()), int(rows.max()) + 1
    if high - low == len(rows) and bool((np.diff(rows) == 1).all()):
        return weight.read(slice(low, high))
    gap = 1 + _GAP * as_matrix(weight.shape)[0] // max(1, weight.nbytes)
    runs = _runs(rows, gap)
    if len(runs) == 1:
        return {part: array[rows - low] for part, array in weight.read(slice(low, high)).items()}
    read = [weight.read(slice(a, b)) for a, b in runs]
    starts = np.asarray([a for a, _ in runs])
    before = np.cumsum([0, *(b - a for a, b in runs[:-1])])  # rows that were read before a run
    place = rows - (starts - before)[np.searchsorted(starts, rows, "right") - 1]
    return {part: np.concatenate([r[part] for r in read])[place] for part in read[0]}


def _runs(rows: Index, gap: int) -> list[tuple[int, int]]:
    """Spans [a, b) that cover the rows, at least `gap` rows apart."""
    found = np.unique(rows)
    cuts = np.flatnonzero(np.diff(found) > gap)
    firsts, lasts = found[np.append(0, cuts + 1)], found[np.append(cuts, len(found) - 1)]
    return [(int(a), int(b) + 1) for a, b in zip(firsts, lasts, strict=True)]


# ---------------------------------------------------------------- stacks


@dataclass(frozen=True, slots=True)
class _Span:
    """Entries [start, stop) of a stored array's first axis."""

    whole: StoredArray
    start: int
    stop: int

    @property
    def spec(self) -> ArraySpec:
        """Shape and dtype of the span."""
        found = self.whole.spec
        return replace(found, shape=(self.stop - self.start, *found.shape[1:]))

    def view(self) -> NDArray[Any]:
        """The span of the file's map: nothing is copied."""
        return self.whole.view()[self.start : self.stop]

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Entries [start, stop) of the span."""
        return self.whole.read(self.start + start, self.start + stop)


def expert(weight: Weight, index: int) -> Weight:
    """Matrix `index` of a stack [experts, rows, K] as a weight [rows, K]: its parts are spans of the stack's, and nothing is read.

    Raises InputError for what is no stack or an expert that it lacks, UnsupportedError for a codec whose parts belong to the whole stack.
    """
    shape = weight.shape
    if len(shape) < 3 or not 0 <= index < math.prod(shape[:-2]):
        raise InputError(f"has no matrix {index}", tensor=weight.name, expected="[experts, rows, K]", found=list(shape))
    n = shape[-2]
    total = as_matrix(shape)[0]
    apart = weight.codec.row_sliced and all(a.spec.shape[:1] == (total,) for a in weight.arrays.values())
    if not apart:
        raise UnsupportedError(
            f"{weight.codec.name} holds a stack as one: its matrices cannot be taken apart",
            tensor=weight.name,
            hint="convert it to a codec of blocks, e.g. q8_0, or tq2_0 for ternary weights",
        )
    spans = {part: _Span(array, index * n, (index + 1) * n) for part, array in weight.arrays.items()}
    return Weight(f"{weight.name}[{index}]", shape[-2:], weight.codec, spans)


def experts(weight: Weight) -> tuple[Weight, ...]:
    """All matrices of a stack. Raises as `expert`."""
    return tuple(expert(weight, i) for i in range(math.prod(weight.shape[:-2])))
