"""What one step does to one tensor: whole, or a block of its rows.

A step yields `Piece`s: parts of the rows from `start` on, ready to be written, with the error that was measured on the way. Memory holds one
piece of a step that streams. A tensor that cannot be cut (I2_S, TL: one scale, one permutation; trellis codes: rotated as a whole) is held once.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from polyquant.calibration.hessians import Hessians
from polyquant.capabilities import FitsInputs
from polyquant.codecs.affine_forms import affine_of, recoded, reordered
from polyquant.codecs.affine_reader import decoded_rows
from polyquant.codecs.transcode import transcode
from polyquant.conversion.steps import Plan
from polyquant.errors import CodecError
from polyquant.formats.steps import Piece, Step
from polyquant.ops.metrics import ErrorSums, error_sums
from polyquant.quantizers.absmean import absmean_codes, absmean_floats
from polyquant.quantizers.ldlq import quantize_trellis
from polyquant.types import F32, Action, Affine, Floats, Parts, Ternary, TrellisCodes, Weight, as_matrix

__all__ = ["blocks", "stream", "whole"]


def blocks(step: Step) -> Iterator[slice | None]:
    """Row blocks of a step; one None where it cannot be cut."""
    rows, _ = as_matrix(step.map.shape)
    reordered_vector = step.map.row_order is not None and len(step.map.shape) == 1  # one row as codecs see it
    if not step.streams or step.map.ternarize or rows == 0 or reordered_vector:
        yield None
        return
    for a in range(0, rows, step.block_rows):
        yield slice(a, min(rows, a + step.block_rows))


def stream(plan: Plan, step: Step, rows: slice, *, measure: bool) -> Piece:
    """Rows [a, b) of the target, for a step that streams."""
    _, k = as_matrix(step.map.shape)
    shape = (rows.stop - rows.start, k)
    parts = _read_rows(plan.source[step.map.source], rows, step.map.row_order)
    out, error = _convert(step, parts, shape, plan.importance.get(step.map.target), measure=measure)
    return Piece(out, rows.start, shape[0], error)


def _read_rows(weight: Weight, rows: slice, order: NDArray[np.int64] | None) -> Parts:
    """Target rows by positioned reads; a permutation reads the span that its rows lie in."""
    if order is None:
        return weight.read(rows)
    wanted = order[rows]
    low, high = int(wanted.min()), int(wanted.max()) + 1
    return {part: array[wanted - low] for part, array in weight.read(slice(low, high)).items()}


def _convert(
    step: Step, parts: Parts, shape: tuple[int, int], importance: NDArray[np.float32] | None, *, measure: bool
) -> tuple[Parts, ErrorSums | None]:
    """One row block from parts to parts, by the step's action."""
    assert step.source is not None
    source, target = step.source, step.target
    if step.action is Action.COPY:
        return parts, None
    if step.action is Action.TRANSCODE and target.form is Ternary:
        out, _ = transcode(parts, shape, source, target)
        return out, None
    if _keeps_codes(step):
        return _recoded(step, parts, shape, None, measure=measure)
    w = source.dequantize(parts, shape)
    out = target.pack(Floats(w) if target.form is Floats else target.quantize(w, importance=importance))
    return out, error_sums(w, target.dequantize(out, shape)) if measure else None


def _keeps_codes(step: Step) -> bool:
    """True if codes on an affine grid move into another codec."""
    assert step.source is not None
    return step.action is Action.TRANSCODE and Affine in (step.source.form, step.target.form)


def _recoded(
    step: Step, parts: Parts, shape: tuple[int, int], order: NDArray[np.int64] | None, *, measure: bool
) -> tuple[Parts, ErrorSums | None]:
    """The same codes as parts of the target. Its error is that of scales that were rounded."""
    assert step.source is not None
    codes = affine_of(step.source, parts, shape)
    assert codes is not None, step.source.name
    codes = codes if order is None else reordered(codes, order)
    out = recoded(codes, step.target)
    return out, _rounding(step, codes, out, shape) if measure else None


def _rounding(step: Step, codes: Affine, out: Parts, shape: tuple[int, int]) -> ErrorSums:
    """What the target's scales changed, some rows at a time."""
    after, total = affine_of(step.target, out, shape), ErrorSums()
    for a in range(0, shape[0], step.block_rows):
        rows = slice(a, min(shape[0], a + step.block_rows))
        w = decoded_rows(codes, rows)
        v = step.target.dequantize(out, shape, rows=rows) if after is None else decoded_rows(after, rows)
        total += error_sums(w, v)
    return total


def whole(plan: Plan, step: Step, *, measure: bool, hessians: Hessians | None = None) -> Iterator[Piece]:
    """A tensor that is read whole. hessians: for trellis codes that are searched on inputs."""
    weight = plan.source[step.map.source]
    source, target, shape, order = weight.codec, step.target, step.map.shape, step.map.row_order
    if step.action is Action.COPY and order is None:
        yield Piece(weight.read())
    elif _keeps_codes(step):
        parts, error = _recoded(step, weight.read(), as_matrix(shape), order, measure=measure)
        yield Piece(parts, error=error)
    elif source.form is Ternary and target.form is Ternary and order is None:
        parts, change = transcode(weight.read(), shape, source, target)
        yield Piece(parts, note=str(change))
    elif step.action is Action.TRANSCODE and target.form is TrellisCodes and order is None:
        yield Piece(target.pack(source.unpack(weight.read(), shape)))
    elif target.form is Ternary:
        codes = _ternary_codes(weight, step)
        if order is not None:
            codes = Ternary(codes.codes[order], codes.scale if codes.scale.size == 1 else codes.scale[order])
        yield Piece(target.pack(codes))
    elif isinstance(target, FitsInputs):
        yield _search(plan, step, weight, hessians)
    else:
        yield from _from_floats(plan, step, _floats(weight, step), measure=measure)


def _floats(weight: Weight, step: Step) -> F32:
    """The whole weight [rows, K] in the order of the target."""
    shape, order = step.map.shape, step.map.row_order
    w = absmean_floats(weight) if step.map.ternarize else weight.codec.dequantize(weight.read(), shape)
    w = w.reshape(as_matrix(shape))
    if order is None:
        return w
    return w[:, order] if len(shape) == 1 else w[order]


def _search(plan: Plan, step: Step, weight: Weight, hessians: Hessians | None) -> Piece:
    """Trellis codes of a weight. The error is always measured: the folder states it."""
    target = step.target
    assert isinstance(target, FitsInputs)
    name = step.map.target
    h, note = (plan.importance.get(name), "") if hessians is None else hessians.of(step.map.source)
    w = _floats(weight, step)
    found = quantize_trellis(target, w, h)
    parts = target.pack(found.codes)
    notes = "; ".join(f"{name}: {n}" for n in (note, found.note) if n)
    return Piece(parts, error=error_sums(w, target.dequantize(parts, step.map.shape)), note=notes)


def _from_floats(plan: Plan, step: Step, w: F32, *, measure: bool) -> Iterator[Piece]:
    """Floats that are at hand whole, into a codec: by row blocks where it can be cut."""
    target, importance = step.target, plan.importance.get(step.map.target)
    size = step.block_rows if target.row_sliced else max(1, len(w))
    for a in range(0, max(1, len(w)), size):
        block = w[a : a + size]
        parts = target.pack(Floats(block) if target.form is Floats else target.quantize(block, importance=importance))
        error = error_sums(block, target.dequantize(parts, block.shape)) if measure else None
        yield Piece(parts, a, len(block), error)


def _ternary_codes(weight: Weight, step: Step) -> Ternary:
    """Codes of a whole tensor, one byte a weight: ternary already, a BitNet master weight, or floats that must be ternary."""
    rows, k = as_matrix(weight.shape)
    if weight.codec.form is Ternary:
        codes: Ternary = weight.codec.unpack(weight.read(), weight.shape)
        return codes
    if step.map.ternarize:
        return absmean_codes(weight)
    out, scale = np.empty((rows, k), np.int8), np.float32(0)
    held = None if weight.codec.row_sliced else weight.codec.dequantize(weight.read(), (rows, k))
    for a in range(0, rows, step.block_rows):
        part = slice(a, min(rows, a + step.block_rows))
        floats = weight.codec.dequantize(weight.read(part), (part.stop - a, k)) if held is None else held[part]
        block = step.target.quantize(floats)
        assert isinstance(block, Ternary)
        out[part] = block.codes
        found = np.float32(block.scale.max())
        if found != 0 and scale not in (0, found):
            raise CodecError(
                "rows have different scales; one scale per tensor cannot hold them",
                expected=scale,
                found=found,
                hint="choose tq1_0 or tq2_0",
            )
        scale = max(scale, found)
    return Ternary(out, np.array([scale], np.float32))
