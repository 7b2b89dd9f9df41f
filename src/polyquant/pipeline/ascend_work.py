"""What one step does to one tensor of an msModelSlim folder: a linear layer's weight to codes, a tensor that smoothing changes, one that it adds.

Rows of a weight are made apart wherever each has a grid of its own, so that memory holds a block of rows, not a weight.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from polyquant.codecs.ascend import Ascend
from polyquant.codecs.dtypes import NUMPY, WORDS
from polyquant.ops.metrics import error_sums
from polyquant.pipeline.ascend_options import AscendOptions
from polyquant.pipeline.ascend_target import module_of, ranges_of
from polyquant.pipeline.steps import Plan, Step
from polyquant.pipeline.work import Piece
from polyquant.quantizers.affine import quantize_linear
from polyquant.types import F32, Action, as_matrix

__all__ = ["pieces", "takes"]

_ONE = frozenset({"input_scale", "input_offset"})
"""Parts that are the same for every row."""


def takes(plan: Plan, step: Step) -> bool:
    """True if the step is this module's work, not that of any other conversion."""
    return plan.ascend is not None and isinstance(step.target, Ascend) and step.action in (Action.QUANTIZE, Action.REQUANTIZE)


def pieces(plan: Plan, step: Step, rows: slice | None, *, measure: bool) -> Iterator[Piece]:
    """The weight, or rows [a, b) of it, as codes. Raises CodecError."""
    options, target = plan.ascend, step.target
    assert options is not None
    assert isinstance(target, Ascend)
    n, k = as_matrix(step.map.shape)
    start, stop = (0, n) if rows is None else (rows.start, rows.stop)
    w = _floats(plan, step, start, stop)
    found = quantize_linear(
        target,
        w,
        input_range=ranges_of(options, step.map.source) if target.static else None,
        bias=_bias(plan, step, start, stop) if target.static else None,
        effort=options.effort or "default",
        exact=_exact(options),
    )
    parts = target.pack(found)
    error = error_sums(w, target.dequantize(parts, (stop - start, k))) if measure else None
    if start:
        parts = {key: array for key, array in parts.items() if key not in _ONE}
    yield Piece(parts, start, stop - start, error)


def _floats(plan: Plan, step: Step, start: int, stop: int) -> F32:
    """Rows of the source's weight, in the order of the target."""
    weight, order = plan.source[step.map.source], step.map.row_order
    n, k = as_matrix(step.map.shape)
    if not weight.codec.row_sliced:
        w = weight.codec.dequantize(weight.read(), (n, k))
        return w[slice(start, stop)] if order is None else w[order[start:stop]]
    if order is None:
        return weight.codec.dequantize(weight.read(slice(start, stop)), (stop - start, k))
    low, high = int(order[start:stop].min()), int(order[start:stop].max()) + 1
    return weight.codec.dequantize(weight.read(slice(low, high)), (high - low, k))[order[start:stop] - low]


def _bias(plan: Plan, step: Step, start: int, stop: int) -> F32 | None:
    """What the layer adds to its outputs, float32 of some rows; None if it has no bias."""
    found = plan.source.weights.get(f"{module_of(step.map.source)}.bias")
    if found is None:
        return None
    values = found.codec.dequantize(found.read(), found.shape)
    if step.map.row_order is not None:
        values = values[step.map.row_order]
    return np.ascontiguousarray(values[start:stop], np.float32)


def _exact(options: AscendOptions) -> np.dtype[np.generic] | None:
    """The type that the tool would compute in; None for our own float32."""
    return NUMPY[WORDS[options.dtype]] if options.exact_tool else None
