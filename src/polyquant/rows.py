"""Rows of a tensor that is made of others, read from their files a block at a time; and one matrix of a stack as a weight of its own.

Parts that lie in memory take the place of stored ones (`in_memory`). Memory holds the rows of a block: of sources whose codecs cannot be read by rows (I2_S, trellis codes) one whole source.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyquant.capabilities import Cut, Stackable
from polyquant.errors import CodecError, InputError, UnsupportedError
from polyquant.operations import Index, Operation, Same
from polyquant.types import F32, ArraySpec, Codec, Parts, StoredArray, Weight, as_matrix

__all__ = ["HeldArray", "expert", "experts", "float_rows", "in_memory", "matrix_name", "stored_rows", "whole_floats"]

_GAP = 1 << 16
"""Bytes between two rows that are read rather than skipped."""


# ---------------------------------------------------------------- parts in memory


@dataclass(frozen=True, slots=True, eq=False)
class HeldArray:
    """A part that lies in memory: a types.StoredArray."""

    array: NDArray[Any]

    @property
    def spec(self) -> ArraySpec:
        """Shape and dtype."""
        return ArraySpec(self.array.shape, self.array.dtype)

    def view(self) -> NDArray[Any]:
        """The array itself."""
        return self.array

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """A copy of the entries [start, stop)."""
        return self.array[start:stop].copy() if self.array.shape else self.array.copy()


def in_memory(parts: Parts) -> dict[str, StoredArray]:
    """Parts of a weight whose arrays lie in memory: no copies."""
    return {part: HeldArray(array) for part, array in parts.items()}


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
class _Piece:
    """What a cut leaves of a stored array."""

    whole: StoredArray
    cut: Cut

    @property
    def spec(self) -> ArraySpec:
        """Shape and dtype of what is left."""
        found, axis = self.whole.spec, self.cut.axis
        return replace(found, shape=(*found.shape[:axis], sum(map(_length, self.cut.pieces)), *found.shape[axis + 1 :]))

    def view(self) -> NDArray[Any]:
        """One span of the first axis lies in the file's map; anything else is put together in memory."""
        return _taken(self.whole.view(), self.cut)

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Entries [start, stop) of the first axis; for a cut along another axis these are read of the whole array."""
        if self.cut.axis:
            return _taken(self.whole.read(start, stop), self.cut)
        found, at = [self.whole.read(0, 0)], 0
        for piece in self.cut.pieces:
            low, high = max(start - at, 0), min(stop - at, _length(piece))
            at += _length(piece)
            if low < high and isinstance(piece, slice):
                found.append(self.whole.read(piece.start + low, piece.start + high))
            elif low < high:
                found.append(np.zeros((high - low, *found[0].shape[1:]), found[0].dtype))
        return found[1] if len(found) == 2 else np.concatenate(found)


def _length(piece: slice | int) -> int:
    return piece if isinstance(piece, int) else int(piece.stop - piece.start)


def _taken(whole: NDArray[Any], cut: Cut) -> NDArray[Any]:
    """The pieces of an array that is in memory or mapped."""
    before, after = whole.shape[: cut.axis], whole.shape[cut.axis + 1 :]
    found = [
        np.zeros((*before, p, *after), whole.dtype) if isinstance(p, int) else whole[(slice(None),) * cut.axis + (p,)]
        for p in cut.pieces
    ]
    return found[0] if len(found) == 1 and not cut.axis else np.concatenate(found, axis=cut.axis)


def matrix_name(stack: str, index: int) -> str:
    """What one matrix of a stack is called, wherever it is asked for by itself."""
    return f"{stack}[{index}]"


def expert(weight: Weight, index: int) -> Weight:
    """Matrix `index` of a stack [experts, rows, K] as a weight [rows, K]: its parts are pieces of the stack's, and nothing is read.

    Raises InputError for what is no stack or an expert that it lacks, UnsupportedError where the bytes of the codec belong to several matrices.
    """
    shape = weight.shape
    if len(shape) < 3 or not 0 <= index < math.prod(shape[:-2]):
        raise InputError(f"has no matrix {index}", tensor=weight.name, expected="[experts, rows, K]", found=list(shape))
    try:
        codec, cuts = _cuts(weight, index)
    except CodecError as problem:
        raise UnsupportedError(
            problem.message,
            tensor=weight.name,
            expected=problem.expected,
            found=problem.found,
            hint=problem.hint or "convert it to a codec of blocks, e.g. q8_0, or tq2_0 for ternary weights",
        ) from None
    pieces = {part: _Piece(array, cuts[part]) for part, array in weight.arrays.items()}
    return Weight(matrix_name(weight.name, index), shape[-2:], codec, pieces)


def _cuts(weight: Weight, index: int) -> tuple[Codec, Mapping[str, Cut]]:
    """Codec and cuts of one matrix. Raises CodecError where there are none."""
    found, n, total = weight.codec, weight.shape[-2], as_matrix(weight.shape)[0]
    if found.row_sliced and all(a.spec.shape[:1] == (total,) for a in weight.arrays.values()):
        return found, dict.fromkeys(weight.arrays, Cut((slice(index * n, (index + 1) * n),)))
    if not isinstance(found, Stackable):
        raise CodecError(f"{found.name} holds a stack as one and does not say where its matrices lie")
    specs = found.specs(weight.shape)
    if any(specs[part].shape != array.spec.shape for part, array in weight.arrays.items()):
        raise CodecError(f"{found.name} cannot be taken apart here: its parts are stored in another shape")
    return found.cut(weight.shape, index)


def experts(weight: Weight) -> tuple[Weight, ...]:
    """All matrices of a stack. Raises as `expert`."""
    return tuple(expert(weight, i) for i in range(math.prod(weight.shape[:-2])))
