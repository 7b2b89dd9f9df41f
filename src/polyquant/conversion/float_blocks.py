"""Convert weights of small floats row block by row block, although some of their parts belong to several rows.

A block has whole blocks of the source's and the target's scales; of each part it reads and writes the entries of its
rows. The scale of the tensor is read with each block. A scale of the tensor that must be computed takes another pass
over the source, for its largest magnitude.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from polyquant.capabilities import CutsParts, MayNeedPeak, Stackable, claims
from polyquant.codecs.float_codec import decoded_floats, factors
from polyquant.codecs.float_forms import RowsOf, moved, refloated, scales_of, unfloated
from polyquant.conversion.steps import Plan
from polyquant.formats.steps import Piece, Step, shared_importance
from polyquant.operations import Same
from polyquant.ops.metrics import ErrorSums, error_sums
from polyquant.types import F32, Action, Codec, Floats, Parts, ScaledFloats, Weight, as_matrix

__all__ = ["moved_floats", "refloated_rows", "row_blocks", "stacked_blocks"]


def _lines(codec: Codec) -> Mapping[str, int] | None:
    """Rows for one entry of each part; None if every part has one per row."""
    return codec.lines if not codec.row_sliced and claims(codec, CutsParts) else None  # type: ignore[type-abstract]


def _parts(weight: Weight, rows: slice) -> Parts:
    """Parts of these rows, as those of a separate weight."""
    return weight.read(rows) if _lines(weight.codec) is None else dict(RowsOf(weight, rows))


def row_blocks(plan: Plan, step: Step, weight: Weight, *, measure: bool) -> Iterator[Piece]:
    """Convert a weight, one block of rows after the other."""
    importance = shared_importance(plan.importance.get(step.map.target))
    yield from _blocks(step, weight, step.target, importance, 0, measure=measure)


def stacked_blocks(plan: Plan, step: Step, weights: Sequence[Weight], *, measure: bool) -> Iterator[Piece]:
    """Convert matrices to a stack in which each keeps its own scales, one after the other."""
    target, importance = step.target, plan.importance.get(step.map.target)
    assert claims(target, Stackable)  # type: ignore[type-abstract]
    for index, weight in enumerate(weights):
        own = importance[index] if importance is not None and importance.ndim > 1 else importance
        one, _ = target.cut(step.map.shape, index)
        yield from _blocks(step, weight, one, own, index * step.map.shape[-2], measure=measure)


def _blocks(
    step: Step, weight: Weight, target: Codec, importance: F32 | None, first: int, *, measure: bool
) -> Iterator[Piece]:
    """Blocks of a weight whose rows are those of the target from row `first` on."""
    source, (n, k) = weight.codec, as_matrix(weight.shape)
    own = [line for codec in (source, target) for line in (_lines(codec) or {}).values() if line]
    unit = math.lcm(32, *own)
    size = max(1, step.block_rows // unit) * unit
    kept = step.action in (Action.COPY, Action.TRANSCODE)
    peak = None
    if not kept and claims(target, MayNeedPeak) and target.needs_peak:  # type: ignore[type-abstract]
        peak = max((_peak(weight, slice(a, min(n, a + size)), k) for a in range(0, n, size)), default=0.0)
    for a in range(0, max(1, n), size):
        rows = slice(a, min(n, a + size))
        parts, shape = _parts(weight, rows), (rows.stop - a, k)
        error = None
        if step.action is Action.COPY:
            made: Parts = parts
        elif kept:
            made, error = refloated_rows(source, target, parts, shape, measure=measure)
        else:
            w = source.dequantize(parts, shape)
            made = _quantized(target, w, importance, peak)
            error = error_sums(w, target.dequantize(made, shape)) if measure else None
        yield Piece(made, first + a, shape[0], error, offsets=_offsets(step.target, made, first + a))


def _peak(weight: Weight, rows: slice, k: int) -> float:
    """Largest magnitude of these rows."""
    w = weight.codec.dequantize(_parts(weight, rows), (rows.stop - rows.start, k))
    return float(max(w.max(initial=0), -w.min(initial=0)))


def _quantized(target: Codec, w: F32, importance: F32 | None, peak: float | None) -> Parts:
    if target.form is Floats:
        return target.pack(Floats(w))
    if claims(target, MayNeedPeak):  # type: ignore[type-abstract]
        codes = target.quantize(w, importance=importance, peak=peak)
    else:
        codes = target.quantize(w, importance=importance)
    return target.pack(codes)


def _offsets(target: Codec, made: Parts, start: int) -> dict[str, int] | None:
    """Bytes before each part of the rows from `start`; None if all parts have one entry per row."""
    lines = _lines(target)
    if lines is None:
        return None
    return {part: start // line * (x.nbytes // max(1, len(x))) if (line := lines[part]) else 0
            for part, x in made.items()}  # fmt: skip


def refloated_rows(
    source: Codec, target: Codec, parts: Parts, shape: tuple[int, int], *, measure: bool
) -> tuple[Parts, ErrorSums | None]:
    """Parts of the target with equal codes, and the error of rounded scales."""
    codes = unfloated(source, parts, shape)
    made = refloated(codes, target)
    if not measure or _unchanged(codes, scales_of(target, made, shape)):
        return made, None
    return made, error_sums(decoded_floats(codes), target.dequantize(made, shape))


def _unchanged(before: ScaledFloats, after: ScaledFloats) -> bool:
    """True if all scales have the same values, so that no weight changed."""
    a, b = factors(before), factors(after)
    return before.block == after.block and np.array_equal(a, b, equal_nan=True)


def moved_floats(step: Step, weight: Weight, *, measure: bool) -> Piece:
    """Equal codes of a whole weight, whose rows may be permuted."""
    op, shape = step.map.op, as_matrix(step.map.shape)
    codes = unfloated(weight.codec, weight.read(), as_matrix(weight.shape))
    if not isinstance(op, Same):
        codes = moved(codes, op.needs(np.arange(shape[0]), [weight.shape])[0])
    made = refloated(codes, step.target)
    exact = not measure or _unchanged(codes, scales_of(step.target, made, shape))
    return Piece(made, error=None if exact else error_sums(decoded_floats(codes), step.target.dequantize(made, shape)))
