"""Execute a step of an msModelSlim folder: quantize a linear layer, or write a tensor that calibration changes or adds.

Rows are quantized separately if each has its own grid, so that memory holds a block of rows, not a weight.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyquant.codecs.dtypes import NUMPY, WORDS
from polyquant.codecs.msmodelslim import MsModelSlim
from polyquant.codecs.plain import PlainCodec
from polyquant.formats.msmodelslim.choices import bias_type, module_of, ranges_of
from polyquant.formats.msmodelslim.options import MsModelSlimOptions
from polyquant.formats.msmodelslim.prepare import Prepared, prepare
from polyquant.formats.protocol import Context
from polyquant.formats.steps import Piece, Step
from polyquant.operations import Index, Same
from polyquant.ops.affine import quantize_stored
from polyquant.ops.metrics import ErrorSums, error_sums
from polyquant.quantizers.affine import input_side, quantize_linear
from polyquant.rows import float_rows
from polyquant.types import F32, Action, Affine, Floats, Parts, as_matrix

__all__ = ["MsModelSlimWorker"]

_buffers = threading.local()
_ONE = frozenset({"input_scale", "input_offset"})
"""Parts that are the same for all rows."""


class MsModelSlimWorker:
    """A Worker (formats.protocol)."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._prepared: Prepared | None = None

    def order(self, steps: Sequence[Step]) -> list[Step]:
        """The steps; with calibration, in the order in which their inputs become available."""
        options = self._context.options
        if not steps or options.calibration is None:
            return list(steps)
        self._prepared = prepared = prepare(
            self._context.source,
            options,
            _targets(self._context.steps),
            self._context.tick,
            self._context.stages,
            [name for name, _ in _targets(steps)],
        )
        return sorted(steps, key=lambda s: prepared.order(s.inputs) if s.alone else -1)

    def takes(self, step: Step) -> bool:
        """True for quantized weights, and for tensors that calibration adds or changes."""
        if isinstance(step.target, MsModelSlim) and step.quantizes:
            return True
        prepared = self._prepared
        return prepared is not None and any(n in prepared.values or prepared.changes(n) for n in step.map.sources)

    def pieces(self, step: Step, rows: slice | None, *, measure: bool) -> Iterator[Piece]:
        """Convert the tensor, or rows [a, b) of it. Raises CodecError."""
        n, _ = as_matrix(step.map.shape)
        start, stop = (0, n) if rows is None else (rows.start, rows.stop)
        prepared = self._prepared
        if isinstance(step.target, MsModelSlim):
            piece = _codes(self._context, step, start, stop, prepared, measure=measure)
            why = None if prepared is None or start else prepared.notes.get(step.inputs)
            yield piece if why is None else replace(piece, note=f"{step.map.target}: {why}")
            return
        assert prepared is not None
        values = prepared.values.get(step.map.source)
        if values is None:
            floats = _floats(self._context, step, start, stop)
            w = prepared.weight(step.map.source, floats, _source_rows(step, start, stop))
        else:
            w = np.asarray(values, np.float32).reshape(as_matrix(step.map.shape))[start:stop]
        yield Piece(step.target.pack(Floats(w)), start, stop - start)

    def stated(self, step: Step, error: ErrorSums) -> Mapping[str, NDArray[Any]]:
        """No part: the folder does not state errors."""
        return {}


def _targets(steps: Iterable[Step]) -> list[tuple[str, MsModelSlim]]:
    """The source of the inputs, and the codec, of each quantized weight."""
    kept = Action.COPY
    return [(s.inputs, s.target) for s in steps if isinstance(s.target, MsModelSlim) and s.action is not kept]


def _codes(context: Context, step: Step, start: int, stop: int, prepared: Prepared | None, *, measure: bool) -> Piece:
    """Quantize rows of a linear layer's weight, after smoothing."""
    options, target = context.options, step.target
    assert isinstance(target, MsModelSlim)
    name = step.map.sources[0] if prepared is None and not target.static else step.inputs
    inputs = None if not target.static else ranges_of(options, step) if prepared is None else prepared.input_range(name)
    bias = _bias(context, step, prepared) if target.static else None
    if (
        _as_stored(context, step, prepared)
        and (direct := _direct(context, step, start, stop, measure=measure)) is not None
    ):
        plain, error = direct
        if target.static and inputs is not None:
            side = input_side(target, plain, inputs, None if bias is None else bias[start:stop])
            plain = replace(plain, activation=side)
        return _piece(target.pack(plain), start, stop, error)
    w = _floats(context, step, start, stop)
    if prepared is not None:
        w = prepared.weight(step.map.source, w, _source_rows(step, start, stop))
    quantized = quantize_linear(
        target,
        w,
        input_range=inputs if target.static else None,
        bias=None if bias is None else bias[start:stop],
        hessian=None if prepared is None else prepared.hessian(name),
        effort=options.effort or "default",
        exact=_exact(options),
    )
    parts = target.pack(quantized)
    error = error_sums(w, target.dequantize(parts, w.shape, out=_scratch("back", w.shape))) if measure else None
    return _piece(parts, start, stop, error)


def _piece(parts: Parts, start: int, stop: int, error: ErrorSums | None) -> Piece:
    """A piece of rows [start, stop); parts that are the same for all rows are in the first piece."""
    if start:
        parts = {key: array for key, array in parts.items() if key not in _ONE}
    return Piece(parts, start, stop - start, error)


def _as_stored(context: Context, step: Step, prepared: Prepared | None) -> bool:
    """True if stored floats can be quantized directly, each row on the tightest grid, with float32 scales."""
    options, target, name = context.options, step.target, step.map.sources[0]
    assert isinstance(target, MsModelSlim)
    source = context.source[name].codec
    return (
        isinstance(source, PlainCodec)
        and source.name in ("f32", "f16", "bf16")
        and isinstance(step.map.op, Same)
        and not (prepared is not None and prepared.changes(name))
        and not options.exact_tool
        and options.effort != "max"
        and target.kind != "w8a8s"
        and not target.tensor
        and (target.dtype == "f32" or (target.static and not target.scales))
    )


def _direct(
    context: Context, step: Step, start: int, stop: int, *, measure: bool
) -> tuple[Affine, ErrorSums | None] | None:
    """Quantize stored rows and measure their error row by row in the cache; None for NaN or without native kernels."""
    weight, target = context.source[step.map.source], step.target
    assert isinstance(target, MsModelSlim)
    shape = stop - start, as_matrix(step.map.shape)[1]
    result = quantize_stored(
        weight.codec.name, weight.read(slice(start, stop))["blocks"], shape, target.groups(shape), target.bits,
        symmetric=not target.asymmetric, measure=measure,
    )  # fmt: skip
    return None if result is None else (Affine(target.bits, *result[:3]), result[3])


def _floats(context: Context, step: Step, start: int, stop: int) -> F32:
    """Rows of the source's weight, in the order of the target."""
    weights = [context.source[name] for name in step.map.sources]
    if not (isinstance(step.map.op, Same) and weights[0].codec.row_sliced):
        return float_rows(weights, step.map.op, slice(start, stop))
    shape = stop - start, as_matrix(step.map.shape)[1]
    return weights[0].codec.dequantize(weights[0].read(slice(start, stop)), shape, out=_scratch("floats", shape))


def _source_rows(step: Step, start: int, stop: int) -> slice | Index:
    """The source rows of the target's rows [start, stop), for a single source."""
    if isinstance(step.map.op, Same):
        return slice(start, stop)
    return step.map.op.needs(np.arange(start, stop), [s.shape for s in step.sources])[0]


def _scratch(use: str, shape: tuple[int, int]) -> F32:
    """An uninitialized buffer of this thread, valid until the next use: new pages cost more than the arithmetic."""
    size = shape[0] * shape[1]
    held: F32 | None = getattr(_buffers, use, None)
    if held is None or held.size < size:
        held = np.empty(size, np.float32)
        setattr(_buffers, use, held)
    return held[:size].reshape(shape)


def _bias(context: Context, step: Step, prepared: Prepared | None) -> F32 | None:
    """The layer's bias, float32 [N], as stored in the file, since quant_bias is derived from it.

    None if it has none.
    """
    if prepared is not None:
        values = prepared.bias(step.map.source)
    else:
        stored_bias = context.source.weights.get(f"{module_of(step.map.source)}.bias")
        values = None if stored_bias is None else stored_bias.codec.dequantize(stored_bias.read(), stored_bias.shape)
    if values is None:
        return None
    values = step.map.op.reference([values])
    stored = bias_type(context.options)
    return values.astype(NUMPY[WORDS[stored]]).astype(np.float32)


def _exact(options: MsModelSlimOptions) -> np.dtype[np.generic] | None:
    """The type that the tool would compute in; None for our float32."""
    return NUMPY[WORDS[options.dtype]] if options.exact_tool else None
