"""Read rows of a target tensor from its sources in blocks; and extract one matrix of a stack as a separate weight.

Parts in memory can replace stored ones (`in_memory`). Memory holds the rows of a block; of sources whose codecs cannot
be read by rows (I2_S, trellis codes), one complete source.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyquant.capabilities import Cut, CutsParts, Stackable, claims
from polyquant.errors import CodecError, InputError, UnsupportedError
from polyquant.operations import Index, Matrix, Operation, Same, chain, steps_of
from polyquant.types import F32, ArraySpec, Codec, Parts, Shape, StoredArray, Weight, as_matrix

__all__ = [
    "HeldArray",
    "expert",
    "experts",
    "float_rows",
    "in_memory",
    "matrix_name",
    "one_matrix",
    "parted",
    "row_span",
    "stored_rows",
    "whole_floats",
]

_GAP = 1 << 16
"""Gaps of at most this size between rows are read rather than skipped."""


# ---------------------------------------------------------------- parts in memory


@dataclass(frozen=True, slots=True, eq=False)
class HeldArray:
    """A part in memory: a types.StoredArray."""

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
    """Wrap arrays in memory as stored parts, without copies."""
    return {part: HeldArray(array) for part, array in parts.items()}


# ---------------------------------------------------------------- blocks of rows


def stored_rows(weights: Sequence[Weight], op: Operation, rows: slice) -> Parts:
    """Parts of the target's rows [a, b), for an operation that keeps rows and sources of one row_sliced codec."""
    if isinstance(op, Same):
        return weights[0].read(rows)
    index, shapes = np.arange(rows.start, rows.stop), [w.shape for w in weights]
    arrays = [_picked(w, wanted) for w, wanted in zip(weights, op.needs(index, shapes), strict=True)]
    return {part: op.make([f[part] for f in arrays], index, shapes) for part in arrays[0]}


def float_rows(weights: Sequence[Weight], op: Operation, rows: slice | Index) -> F32:
    """The target's rows [a, b), or those of an index, as float32 [n, K]."""
    weights, op = one_matrix(weights, op)
    index = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
    shapes = [w.shape for w in weights]
    arrays = [_decoded(w, wanted) for w, wanted in zip(weights, op.needs(index, shapes), strict=True)]
    return np.asarray(op.make(arrays, index, shapes), np.float32)


def whole_floats(weights: Sequence[Weight], op: Operation) -> F32:
    """The target as float32 of its shape."""
    weights, op = one_matrix(weights, op)
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
    """Parts of these rows, in this order, each read once; small gaps are read too."""
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
    before = np.cumsum([0, *(b - a for a, b in runs[:-1])])  # rows read before each run
    place = rows - (starts - before)[np.searchsorted(starts, rows, "right") - 1]
    return {part: np.concatenate([r[part] for r in read])[place] for part in read[0]}


def _runs(rows: Index, gap: int) -> list[tuple[int, int]]:
    """Spans [a, b) that cover the rows, at least `gap` rows apart."""
    ordered = np.sort(rows)
    cuts = np.flatnonzero(np.diff(ordered) > gap)
    firsts, lasts = ordered[np.append(0, cuts + 1)], ordered[np.append(cuts, len(ordered) - 1)]
    return [(int(a), int(b) + 1) for a, b in zip(firsts, lasts, strict=True)]


# ---------------------------------------------------------------- stacks


@dataclass(frozen=True, slots=True)
class _Piece:
    """A cut of a stored array."""

    whole: StoredArray
    cut: Cut

    @property
    def spec(self) -> ArraySpec:
        """Shape and dtype of the cut."""
        spec, axis = self.whole.spec, self.cut.axis
        return replace(spec, shape=(*spec.shape[:axis], sum(map(_length, self.cut.pieces)), *spec.shape[axis + 1 :]))

    def view(self) -> NDArray[Any]:
        """One span of the first axis is a view of the file's map; anything else is copied."""
        return _taken(self.whole.view(), self.cut)

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Entries [start, stop) of the first axis; a cut along another axis reads these of the whole array."""
        if self.cut.axis:
            return _taken(self.whole.read(start, stop), self.cut)
        arrays, at = [self.whole.read(0, 0)], 0
        for piece in self.cut.pieces:
            low, high = max(start - at, 0), min(stop - at, _length(piece))
            at += _length(piece)
            if low < high and isinstance(piece, slice):
                arrays.append(self.whole.read(piece.start + low, piece.start + high))
            elif low < high:
                arrays.append(np.zeros((high - low, *arrays[0].shape[1:]), arrays[0].dtype))
        return arrays[1] if len(arrays) == 2 else np.concatenate(arrays)


def _length(piece: slice | int) -> int:
    return piece if isinstance(piece, int) else int(piece.stop - piece.start)


def _taken(whole: NDArray[Any], cut: Cut) -> NDArray[Any]:
    """The cut of an array in memory or a map."""
    before, after = whole.shape[: cut.axis], whole.shape[cut.axis + 1 :]
    arrays = [
        np.zeros((*before, p, *after), whole.dtype) if isinstance(p, int) else whole[(slice(None),) * cut.axis + (p,)]
        for p in cut.pieces
    ]
    return arrays[0] if len(arrays) == 1 and not cut.axis else np.concatenate(arrays, axis=cut.axis)


def row_span(weight: Weight, rows: slice) -> Weight:
    """Rows [a, b) of a row_sliced weight as a separate matrix; nothing is read."""
    pieces = {part: _Piece(array, Cut((rows,))) for part, array in weight.arrays.items()}
    return Weight(weight.name, (rows.stop - rows.start, weight.shape[-1]), weight.codec, pieces)


def matrix_name(stack: str, index: int) -> str:
    """The name of one matrix of a stack."""
    return f"{stack}[{index}]"


def expert(weight: Weight, index: int) -> Weight:
    """Matrix `index` of a stack [experts, rows, K] as a weight [rows, K]. Its parts are pieces of the stack's; nothing
    is read.

    Raises InputError for a tensor that is not a stack or an index out of range, UnsupportedError if the codec's bytes
    belong to several matrices.
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


def one_matrix(weights: Sequence[Weight], op: Operation) -> tuple[Sequence[Weight], Operation]:
    """One matrix of a stack as a separate source, whose codes are judged and read without the others; other operations
    unchanged.
    """
    steps = steps_of(op)
    if not steps or not isinstance(steps[0], Matrix) or len(weights) != 1 or len(weights[0].shape) != 3:
        return weights, op
    (stack,) = weights
    rows = as_matrix(stack.shape)[0]
    sliced = stack.codec.row_sliced and all(a.spec.shape[:1] == (rows,) for a in stack.arrays.values())
    apart = sliced or parted(stack.codec, stack.shape)
    return ([expert(stack, steps[0].index)], chain(*steps[1:])) if apart else (weights, op)


def parted(codec: Codec, shape: Shape) -> bool:
    """True for a stack of small floats whose matrices have separate scales."""
    if codec.row_sliced or len(shape) != 3 or not claims(codec, CutsParts):  # type: ignore[type-abstract]
        return False
    lines = max(codec.lines.values())
    return claims(codec, Stackable) and lines == shape[-2]  # type: ignore[type-abstract,arg-type]


def _cuts(weight: Weight, index: int) -> tuple[Codec, Mapping[str, Cut]]:
    """Codec and cuts of one matrix. Raises CodecError if there are none."""
    codec, n, total = weight.codec, weight.shape[-2], as_matrix(weight.shape)[0]
    if codec.row_sliced and all(a.spec.shape[:1] == (total,) for a in weight.arrays.values()):
        return codec, dict.fromkeys(weight.arrays, Cut((slice(index * n, (index + 1) * n),)))
    if not isinstance(codec, Stackable):
        raise CodecError(f"{codec.name} stores a stack as a unit whose matrices cannot be separated")
    specs = codec.specs(weight.shape)
    if any(specs[part].shape != array.spec.shape for part, array in weight.arrays.items()):
        raise CodecError(f"{codec.name} cannot be split here: its parts have a different shape")
    return codec.cut(weight.shape, index)


def experts(weight: Weight) -> tuple[Weight, ...]:
    """All matrices of a stack. Raises as `expert`."""
    return tuple(expert(weight, i) for i in range(math.prod(weight.shape[:-2])))
