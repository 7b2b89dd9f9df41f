"""Convert weights whose parts are transposed or packed along the rows (GPTQ, AWQ, packed zero points) tile by tile.

A tile is a range of rows or of columns of the target such that its parts are contiguous in the file. The same range of
the source is read: whole spans where its parts are laid out the same way, else pieces of each row. Within a tile, some
rows at a time are unpacked and packed, so that codes stay in cache. Weights that cannot be cut are one tile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyquant.capabilities import HoldsAffineCodes, MayFixInputs, PacksRows, claims
from polyquant.codecs.affine_codec import decoded_rows
from polyquant.codecs.affine_forms import affine_of, block_codes, cut_at, recoded, reordered
from polyquant.errors import CodecError
from polyquant.formats.steps import TILE_WEIGHTS, Piece, Step
from polyquant.operations import Index, Same
from polyquant.ops.metrics import ErrorSums, error_sums
from polyquant.types import F32, Affine, Codec, Parts, Shape, StoredArray, Weight, as_matrix

__all__ = ["Packer", "converted", "copied"]

_CHUNK = 1 << 20
"""Weights that are unpacked at once."""
_COPIED = 1 << 23
"""Bytes that are copied at once."""
Packer = Callable[[F32, slice], Affine | Parts]
"""Floats of some rows and of a span of columns of the target -> codes, or parts."""


# ---------------------------------------------------------------- where a tile lies


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows and columns of the target."""

    rows: slice
    columns: slice

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.rows.stop - self.rows.start, self.columns.stop - self.columns.start


def _tiles(step: Step, weights: Sequence[Weight]) -> list[Tile]:
    """The tiles of a step, in order."""
    n, k = as_matrix(step.map.shape)
    whole = [Tile(slice(0, n), slice(0, k))]
    if n * k <= TILE_WEIGHTS or not all(_cuts(array) for w in weights for array in w.arrays.values()):
        return whole
    same = isinstance(step.map.op, Same)
    for axis, length, across in ((0, n, k), (1, k, n)):
        units = [cut_at(c)[axis] for c in (step.target, *(w.codec for w in weights))]
        if 0 in units or not _contiguous(step.target, (n, k), axis):
            continue
        unit = math.lcm(*units)
        if axis == 0 and not same:
            unit = math.lcm(unit, step.map.op.together([w.shape for w in weights]))
        size = max(1, TILE_WEIGHTS // across // unit) * unit
        spans = [slice(a, min(length, a + size)) for a in range(0, length, size)]
        return [Tile(s, slice(0, k)) if axis == 0 else Tile(slice(0, n), s) for s in spans]
    return whole


def _contiguous(codec: Codec, shape: tuple[int, int], axis: int) -> bool:
    """True if spans of rows (axis 0) or columns (axis 1) of a weight are spans of the first axis of every part."""
    unit = cut_at(codec)[axis]
    if shape[axis] <= unit:
        return False
    parts = codec.specs(shape)
    small = codec.specs((unit, shape[1]) if axis == 0 else (shape[0], unit))
    return all(small[part].shape[1:] == spec.shape[1:] for part, spec in parts.items())


def _places(codec: Codec, shape: Shape, rows: slice, columns: slice) -> dict[str, tuple[slice, ...]]:
    """The places of the parts of rows and columns, cut at multiples of `cut_at`, in the parts of a weight [N, K].

    A piece is a weight of the same codec, so `specs` has its extents; those of the weight before it are its start.
    """
    n, k = shape
    whole = codec.specs(shape)
    inside = codec.specs((rows.stop - rows.start, columns.stop - columns.start))
    before = [codec.specs(s) for s, at in (((rows.start, k), rows.start), ((n, columns.start), columns.start)) if at]
    out = {}
    for part, spec in whole.items():
        starts = [max((b[part].shape[i] for b in before if b[part].shape[i] != size), default=0)
            for i, size in enumerate(spec.shape)]  # fmt: skip
        out[part] = tuple(slice(a, a + extent) for a, extent in zip(starts, inside[part].shape, strict=True))
    return out


# ---------------------------------------------------------------- reading


def _cuts(array: StoredArray) -> bool:
    """True if pieces of rows can be read without reading the rows."""
    return getattr(array, "cuts", False) is True


def _read(array: StoredArray, places: tuple[slice, ...]) -> NDArray[Any]:
    """A piece of an array. Raises InputError if the file is too short."""
    shape = array.spec.shape
    if not shape:
        return array.read(0, 1)
    if all(p.start == 0 and p.stop == size for p, size in zip(places[1:], shape[1:], strict=True)):
        return array.read(places[0].start, places[0].stop)
    rectangle: Any = getattr(array, "rectangle", None)
    if rectangle is not None:
        piece: NDArray[Any] = rectangle(places)
        return piece
    return np.ascontiguousarray(array.read(places[0].start, places[0].stop)[(slice(None), *places[1:])])


class _Side:
    """Some rows and columns of a weight. Tables of scales are decoded once."""

    def __init__(self, codec: Codec, parts: Parts, shape: tuple[int, int], first: int = 0) -> None:
        """Parts of rows from `first` on, of this shape. Raises CodecError if a part does not fit."""
        self.codec, self.parts, self.shape, self.first = codec, parts, shape, first
        self.bits = getattr(codec, "bits", 0)
        self._affine = codec if claims(codec, HoldsAffineCodes) else None  # type: ignore[type-abstract]
        self._tables = None if self._affine is None else self._affine.group_tables(parts, shape)
        self._grids = codec if claims(codec, MayFixInputs) else None  # type: ignore[type-abstract]
        self._codes: Affine | None = None

    @classmethod
    def read(cls, weight: Weight, wanted: Index, columns: slice) -> _Side:
        """Read the rows that hold these ones. Raises InputError, CodecError."""
        n, k = as_matrix(weight.shape)
        unit, cut_columns = cut_at(weight.codec)
        rows = slice(0, n)
        if len(wanted) and unit:
            rows = slice(int(wanted.min()) // unit * unit, min(n, (int(wanted.max()) // unit + 1) * unit))
        if rows == slice(0, n) and (columns == slice(0, k) or not cut_columns):
            return cls(weight.codec, weight.read(), (n, k))
        places = _places(weight.codec, (n, k), rows, columns)
        parts = {part: _read(array, places[part]) for part, array in weight.arrays.items()}
        return cls(weight.codec, parts, (rows.stop - rows.start, columns.stop - columns.start), rows.start)

    def codes(self, wanted: Index) -> Affine:
        """Codes of these rows of the weight, in this order."""
        local, ordered = wanted - self.first, _ascending(wanted)
        if self._affine is not None and self._tables is not None:
            scale, offset, bias, index = self._tables
            spans = [slice(int(local[0]), int(local[-1]) + 1)] if ordered else _spans(local, self.shape[0])
            pieces = [self._affine.codes_of(self.parts, self.shape, s) for s in spans]
            codes = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
            if not ordered:
                codes = codes[_within(local, spans)]
            chosen: Any = spans[0] if ordered else local
            kept_bias = None if bias is None else bias[chosen]
            out = Affine(self._affine.integers.bits, codes, scale[chosen], offset[chosen], bias=kept_bias, index=index)
            grid = self._grids.input_grid(self.parts, out) if self._grids is not None else None
            return out if grid is None else replace(out, activation=grid)
        picked = block_codes(self.codec, self.parts, local if not ordered else slice(int(local[0]), int(local[-1]) + 1))
        if picked is not None:
            return picked
        if self._codes is None:
            self._codes = affine_of(self.codec, self.parts, self.shape)
        assert self._codes is not None, self.codec.name
        return reordered(self._codes, local)

    def floats(self, wanted: Index) -> F32:
        """The weights of these rows, float32 [rows, columns]."""
        if self._affine is not None:
            return values_of(self.codes(wanted))
        local = wanted - self.first
        if self.codec.row_sliced:
            chosen: Any = slice(int(local[0]), int(local[-1]) + 1) if _ascending(local) else local
            parts = {part: array[chosen] for part, array in self.parts.items()}
            return self.codec.dequantize(parts, (len(local), self.shape[1]))
        return self.codec.dequantize(self.parts, self.shape)[local]


def values_of(codes: Affine) -> F32:
    """The weights, float32 [N, K]; with a group index, of scales by column."""
    if codes.index is None:
        return decoded_rows(codes)
    scale, offset = codes.scale[:, codes.index], codes.offset[:, codes.index]
    out: F32 = (codes.codes.astype(np.float32) - offset) * scale
    return out


def _ascending(rows: Index) -> bool:
    return len(rows) > 0 and int(rows[-1] - rows[0]) == len(rows) - 1 and bool((np.diff(rows) == 1).all())


def _spans(rows: Index, length: int) -> list[slice]:
    """Spans of whole groups of 32 rows that hold these rows."""
    groups = np.unique(rows // 32)
    cuts = np.flatnonzero(np.diff(groups) > 1)
    firsts, lasts = groups[np.append(0, cuts + 1)], groups[np.append(cuts, len(groups) - 1)]
    return [slice(32 * int(a), min(length, 32 * int(b) + 32)) for a, b in zip(firsts, lasts, strict=True)]


def _within(rows: Index, spans: Sequence[slice]) -> Index:
    """The places of these rows in the joined spans."""
    starts = np.asarray([s.start for s in spans])
    before = np.cumsum([0, *(s.stop - s.start for s in spans[:-1])])
    which = np.searchsorted(starts, rows, "right") - 1
    return np.asarray(rows - starts[which] + before[which])


# ---------------------------------------------------------------- conversion


def converted(step: Step, weights: Sequence[Weight], pack: Packer | None, *, measure: bool) -> Iterator[Piece]:
    """Convert a tensor tile by tile. pack: quantizes floats; None if the codes are kept.

    Raises InputError for a file that is too short, CodecError for codes that the target cannot hold.
    """
    shape = as_matrix(step.map.shape)
    shared: dict[str, NDArray[Any]] = {}
    total = ErrorSums()
    tiles = _tiles(step, weights)
    for tile in tiles:
        parts, error = _tile(step, weights, tile, pack, measure=measure)
        if error is not None:
            total += error
        offsets = {}
        places = _places(step.target, shape, tile.rows, tile.columns) if len(tiles) > 1 else {}
        for part in list(parts):
            offsets[part] = 0
            if not places:
                continue
            lead = places[part][0] if places[part] else slice(0, 1)
            if tile is not tiles[0] and lead.start == 0:  # one table for all tiles
                if not np.array_equal(shared[part], parts.pop(part)):
                    raise CodecError(f"{step.target} has one value of {part} for the tensor", found="several")
                continue
            if tile is tiles[0]:
                shared[part] = parts[part]
            offsets[part] = lead.start * (parts[part].nbytes // max(1, len(parts[part])))
        yield Piece(parts, error=total if measure and tile is tiles[-1] else None, offsets=offsets)


def _tile(
    step: Step, weights: Sequence[Weight], tile: Tile, pack: Packer | None, *, measure: bool
) -> tuple[dict[str, NDArray[Any]], ErrorSums | None]:
    """Parts of one tile, and the error."""
    op, shapes, target = step.map.op, [w.shape for w in weights], step.target
    same, total = isinstance(op, Same), ErrorSums()
    index = np.arange(tile.rows.start, tile.rows.stop)
    wanted = (index,) if same else op.needs(index, shapes)
    sides = [_Side.read(w, rows, tile.columns) for w, rows in zip(weights, wanted, strict=True)]
    filler: Any = target if claims(target, PacksRows) and len(sides) == 1 else None  # type: ignore[type-abstract]
    filled = None if filler is None else filler.empty(tile.shape)
    size = max(128, _CHUNK // max(1, tile.shape[1]) // 128 * 128)  # 128 rows: a cache line of words of AWQ
    if filled is None and not target.row_sliced:
        size = max(1, len(index))
    made: list[Parts] = []
    for a in range(0, max(1, len(index)), size):
        chunk = index[a : a + size]
        needs = (chunk,) if same else op.needs(chunk, shapes)
        if filled is not None:
            codes = _codes(sides[0], needs[0], pack, tile.columns)
            filler.pack_rows(codes, a, filled, tile.shape)
            continue
        packed = [_packed(s, rows, pack, tile.columns, target) for s, rows in zip(sides, needs, strict=True)]
        if len(packed) > 1:
            packed = [{part: op.make([p[part] for p in packed], chunk, shapes) for part in packed[0]}]
        made.append(packed[0])
    parts = dict(filled) if filled is not None else _joined(made)
    if not measure:
        return parts, None
    after = _Side(target, parts, tile.shape, tile.rows.start)
    for a in range(0, len(index), size):
        chunk = index[a : a + size]
        needs = (chunk,) if same else op.needs(chunk, shapes)
        floats = [s.floats(rows) for s, rows in zip(sides, needs, strict=True)]
        w = floats[0] if len(floats) == 1 else np.asarray(op.make(floats, chunk, shapes), np.float32)
        total += error_sums(w, after.floats(chunk))
    return parts, total


def _codes(side: _Side, rows: Index, pack: Packer | None, columns: slice) -> Affine:
    """Codes of these rows: kept ones, or those that `pack` chooses."""
    if pack is None:
        return side.codes(rows)
    codes = pack(side.floats(rows), columns)
    assert isinstance(codes, Affine)
    return codes


def _packed(side: _Side, rows: Index, pack: Packer | None, columns: slice, target: Codec) -> Parts:
    """Parts of the target for these rows."""
    if pack is None:
        return recoded(side.codes(rows), target)
    parts = pack(side.floats(rows), columns)
    return target.pack(parts) if isinstance(parts, Affine) else parts


def _joined(made: Sequence[Parts]) -> dict[str, NDArray[Any]]:
    if len(made) == 1:
        return dict(made[0])
    return {part: np.concatenate([m[part] for m in made]) for part in made[0]}


def copied(weight: Weight) -> Iterator[Piece]:
    """The parts as they are, some megabytes at a time."""
    for part, array in weight.arrays.items():
        length = array.spec.shape[0] if array.spec.shape else 1
        row = array.spec.nbytes // max(1, length)
        size = max(1, _COPIED // max(1, row))
        for a in range(0, max(1, length), size):
            yield Piece({part: array.read(a, min(length, a + size))}, offsets={part: a * row})
