"""Convert one tensor, at once or in blocks of rows.

A step yields `Piece`s: parts of rows, ready to be written, with their measured error. A streaming step holds one piece
in memory. A tensor that cannot be split (I2_S, TL: one scale or one permutation; trellis codes: rotated as a whole) is
held once. polyquant.operations and polyquant.rows get the rows from the sources.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from polyquant.capabilities import QuantizesStored, claims
from polyquant.codecs.affine_codec import decoded_rows
from polyquant.codecs.affine_forms import affine_of, recoded
from polyquant.codecs.transcode import transcode
from polyquant.conversion.float_blocks import moved_floats, refloated_rows, row_blocks, stacked_blocks
from polyquant.conversion.steps import Plan
from polyquant.conversion.tiles import Packer, converted, copied
from polyquant.errors import CodecError
from polyquant.formats.steps import Piece, Step, by_blocks, cuts_parts, shared_importance, stacks_parts
from polyquant.operations import Same
from polyquant.ops.metrics import ErrorSums, error_sums
from polyquant.quantizers.absmean import absmean_codes, absmean_floats
from polyquant.rows import float_rows, one_matrix, stored_rows, whole_floats
from polyquant.storage.phases import phase
from polyquant.types import (
    F32,
    Action,
    Affine,
    Blocks,
    Checkpoint,
    Floats,
    Parts,
    ScaledFloats,
    Ternary,
    TrellisCodes,
    Weight,
    as_matrix,
)

__all__ = ["blocks", "convert_rows", "convert_tensor", "floats"]


def blocks(step: Step) -> Iterator[slice | None]:
    """Row blocks of a step; one None if it cannot be split."""
    rows, _ = as_matrix(step.map.shape)
    remade_vector = not isinstance(step.map.op, Same) and len(step.map.shape) == 1  # a vector is one row for codecs
    if not step.streams or step.map.ternarize or rows == 0 or remade_vector:
        yield None
        return
    for a in range(0, rows, step.block_rows):
        yield slice(a, min(rows, a + step.block_rows))


def convert_rows(plan: Plan, step: Step, rows: slice, *, measure: bool) -> Piece:
    """Convert rows [a, b) of the target of a streaming step."""
    _, k = as_matrix(step.map.shape)
    weights, n = _weights(plan, step), rows.stop - rows.start
    if step.action is Action.COPY:
        return Piece(stored_rows(weights, step.map.op, rows), rows.start, n)
    if step.action is Action.TRANSCODE and step.target.form is not Floats:
        parts = stored_rows(weights, step.map.op, rows)
        out, error = _transcoded(step, parts, (n, k), measure=measure and not step.exact)
        return Piece(out, rows.start, n, error)
    if isinstance(step.map.op, Same) and weights[0].codec.row_sliced:
        parts = weights[0].read(
            rows
        )  # kept until return: memory freed earlier would be faulted in again for every block
        if (done := _stored_quantized(plan, step, parts, (n, k), measure=measure)) is not None:
            return Piece(done[0], rows.start, n, done[1])
        with phase("decode", sum(part.nbytes for part in parts.values())):
            w = weights[0].codec.dequantize(parts, (n, k))
    else:
        with phase("decode"):
            w = float_rows(weights, step.map.op, rows)
    out = _packed(step, w, rows.start, plan.importance.get(step.map.target))
    error = _measured(step, w, out) if measure else None
    return Piece(out, rows.start, n, error)


def _stored_quantized(
    plan: Plan, step: Step, parts: Parts, shape: tuple[int, int], *, measure: bool
) -> tuple[Parts, ErrorSums | None] | None:
    """Rows [rows, K] of the source as parts of the target, and their error, where its codec accepts stored rows."""
    target, importance = step.target, plan.importance.get(step.map.target)
    if step.source is None or list(parts) != ["blocks"] or not claims(target, QuantizesStored):  # type: ignore[type-abstract]
        return None
    if importance is not None and importance.ndim > 1:
        return None
    shared = shared_importance(importance)
    done = target.quantize_stored(step.source.name, parts["blocks"], shape, importance=shared, measure=measure)
    if done is None:
        return None
    return done[0], ErrorSums(shape[0] * shape[1], *done[1]) if measure else None


def _weights(plan: Plan, step: Step) -> list[Weight]:
    return [plan.source[name] for name in step.map.sources]


def _transcoded(step: Step, parts: Parts, shape: tuple[int, int], *, measure: bool) -> tuple[Parts, ErrorSums | None]:
    """Repack equal codes as parts of the target."""
    assert step.source is not None
    if step.target.form is Ternary and step.source.form is Ternary:
        return transcode(parts, shape, step.source, step.target)[0], None
    if step.target.form is Blocks and step.source.form is Blocks:
        return step.target.pack(step.source.unpack(parts, shape)), None
    if _small(step):
        return refloated_rows(step.source, step.target, parts, shape, measure=measure)
    return _recoded(step, parts, shape, measure=measure)


def _small(step: Step) -> bool:
    """True for a step from or to small floats with block scales."""
    return ScaledFloats in (step.target.form, step.source.form if step.source is not None else None)


def proves_equal(step: Step, *, measured: bool) -> bool:
    """True if a step without an error changed no weight. measured: the error was to be measured."""
    if step.action is not Action.TRANSCODE or step.source is None:
        return False
    return step.exact or (step.target.form is step.source.form is Blocks) or (measured and _small(step))


def _packed(step: Step, w: F32, start: int, importance: F32 | None) -> Parts:
    """Quantize rows [start, start + n) to parts of the target.

    importance: [K], or [experts, K] for a stack, whose matrices are then quantized one by one.
    """
    target = step.target
    if target.form is Floats:
        return target.pack(Floats(w))
    if importance is None or importance.ndim == 1 or not target.row_sliced or not len(w):
        return target.pack(target.quantize(w, importance=shared_importance(importance)))
    n = step.map.shape[-2]
    cuts = [start, *range((start // n + 1) * n, start + len(w), n), start + len(w)]
    packed = [
        target.pack(target.quantize(w[a - start : b - start], importance=importance[a // n])) for a, b in pairwise(cuts)
    ]
    return {part: np.concatenate([p[part] for p in packed]) for part in packed[0]} if len(packed) > 1 else packed[0]


def _keeps_codes(step: Step) -> bool:
    """True if affine codes are kept, in another codec or another order."""
    assert step.source is not None
    moved = step.action is Action.COPY and not isinstance(step.map.op, Same) and step.source.form is Affine
    return moved or (step.action is Action.TRANSCODE and Affine in (step.source.form, step.target.form))


def _recoded(step: Step, parts: Parts, shape: tuple[int, int], *, measure: bool) -> tuple[Parts, ErrorSums | None]:
    """Pack the same codes as parts of the target. The error is that of rounded scales."""
    assert step.source is not None
    codes = affine_of(step.source, parts, shape)
    assert codes is not None, step.source.name
    out = recoded(codes, step.target)
    return out, error_sums(decoded_rows(codes), step.target.dequantize(out, shape)) if measure else None


def convert_tensor(plan: Plan, step: Step, *, measure: bool) -> Iterator[Piece]:
    """Convert a tensor that cannot be converted in slices of rows."""
    weights, op = _weights(plan, step), step.map.op
    matrices, left = one_matrix(weights, op)
    same, weight = isinstance(op, Same), weights[0]
    source, target, shape = weight.codec, step.target, step.map.shape
    if step.action is Action.COPY and same and not cuts_parts(step):
        yield from copied(weight)
    elif _small(step) and cuts_parts(step) and isinstance(left, Same):
        yield from row_blocks(plan, step, matrices[0], measure=measure)
    elif stacks_parts(step):
        yield from stacked_blocks(plan, step, weights, measure=measure)
    elif step.action is Action.TRANSCODE and _small(step):
        yield moved_floats(step, weight, measure=measure)
    elif _keeps_codes(step):
        yield from converted(step, weights, None, measure=measure and not step.exact)
    elif by_blocks(step):
        yield from converted(step, weights, _packer(plan, step), measure=measure)
    elif source.form is Ternary and target.form is Ternary and same:
        parts, change = transcode(weight.read(), shape, source, target)
        yield Piece(parts, note=str(change))
    elif step.action is Action.TRANSCODE and target.form is TrellisCodes and same:
        yield Piece(target.pack(source.unpack(weight.read(), shape)))
    elif target.form is Ternary and (same or op.keeps_rows([w.shape for w in weights])):
        yield Piece(target.pack(_joined_codes([_ternary_codes(w, step) for w in weights], weights, step)))
    else:
        yield from _from_floats(plan, step, floats(plan.source, step), measure=measure)


def _packer(plan: Plan, step: Step) -> Packer:
    """Quantizes floats of some columns of the target; a stack has one importance."""
    target, importance = step.target, shared_importance(plan.importance.get(step.map.target))

    def pack(w: F32, columns: slice) -> Affine | Parts:
        if target.form is not Affine:
            return _packed(step, w, 0, importance)
        codes = target.quantize(w, importance=None if importance is None else importance[columns])
        assert isinstance(codes, Affine)
        return codes

    return pack


def floats(source: Checkpoint, step: Step) -> F32:
    """All floats of a step's target, float32 [rows, K]."""
    weights = [source[name] for name in step.map.sources]
    with phase("decode"):
        if step.map.ternarize:
            w = step.map.op.reference([absmean_floats(w).reshape(w.shape) for w in weights])
        else:
            w = whole_floats(weights, step.map.op)
    return w.reshape(as_matrix(step.map.shape))


def _from_floats(plan: Plan, step: Step, w: F32, *, measure: bool) -> Iterator[Piece]:
    """Quantize floats in memory, by row blocks if the codec is row_sliced."""
    target, importance = step.target, plan.importance.get(step.map.target)
    size = step.block_rows if target.row_sliced else max(1, len(w))
    for a in range(0, max(1, len(w)), size):
        block = w[a : a + size]
        parts = _packed(step, block, a, importance)
        error = _measured(step, block, parts) if measure else None
        yield Piece(parts, a, len(block), error)


def _measured(step: Step, w: F32, parts: Parts) -> ErrorSums:
    """The error of parts of the target that were made of floats w [rows, K]."""
    with phase("measure", w.nbytes):
        return error_sums(w, step.target.dequantize(parts, w.shape))


def _ternary_codes(weight: Weight, step: Step) -> Ternary:
    """Ternary codes of a whole tensor, one byte per weight.

    The source is ternary, a BitNet master weight, or floats with ternary values. Raises CodecError if one scale
    does not fit.
    """
    rows, k = as_matrix(weight.shape)
    if weight.codec.form is Ternary:
        codes: Ternary = weight.codec.unpack(weight.read(), weight.shape)
        return codes
    if step.map.ternarize:
        return absmean_codes(weight)
    out, scale = np.empty((rows, k), np.int8), np.float32(0)
    dense = None if weight.codec.row_sliced else weight.codec.dequantize(weight.read(), (rows, k))
    for a in range(0, rows, step.block_rows):
        part = slice(a, min(rows, a + step.block_rows))
        floats = weight.codec.dequantize(weight.read(part), (part.stop - a, k)) if dense is None else dense[part]
        block = step.target.quantize(floats)
        assert isinstance(block, Ternary)
        out[part] = block.codes
        block_scale = np.float32(block.scale.max())
        if block_scale != 0 and scale not in (0, block_scale):
            raise CodecError(
                "rows have different scales; one scale per tensor cannot hold them",
                expected=scale,
                found=block_scale,
                hint="choose tq1_0 or tq2_0",
            )
        scale = max(scale, block_scale)
    return Ternary(out, np.array([scale], np.float32))


def _joined_codes(codes: Sequence[Ternary], weights: Sequence[Weight], step: Step) -> Ternary:
    """The joined codes of the sources; scales that differ become one per row."""
    op, shapes = step.map.op, [w.shape for w in weights]
    if isinstance(op, Same):
        return codes[0]
    index = np.arange(as_matrix(step.map.shape)[0])
    wanted = op.needs(index, shapes)
    joined = op.make([c.codes[r] for c, r in zip(codes, wanted, strict=True)], index, shapes)
    scales = [c.scale for c in codes]
    if all(s.size == 1 and s.reshape(-1)[0] == scales[0].reshape(-1)[0] for s in scales):
        return Ternary(joined, scales[0])
    groups = max(s.shape[-1] for s in scales)
    wide = [np.repeat(s.reshape(-1, s.shape[-1]), groups // s.shape[-1], axis=1) for s in scales]
    rows = [np.broadcast_to(s, (len(c.codes), groups))[r] for s, c, r in zip(wide, codes, wanted, strict=True)]
    return Ternary(joined, np.ascontiguousarray(op.make(rows, index, shapes)))
