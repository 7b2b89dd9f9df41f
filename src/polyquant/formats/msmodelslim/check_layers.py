"""Check the values of quantized layers: scales, offsets, recomputed deq_scale and quant_bias, code ranges.

One layer is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyquant.codecs.dtypes import NUMPY
from polyquant.codecs.msmodelslim import MsModelSlim
from polyquant.errors import InputError
from polyquant.formats.msmodelslim.static import closest_deq_scale, closest_quant_bias, row_sums
from polyquant.formats.msmodelslim.survey import Linear, Survey
from polyquant.formats.stored import Stored
from polyquant.ops.int8 import quant_bias
from polyquant.types import F32, ArraySpec, Finding, Severity, StoredArray

__all__ = ["check_layers", "deq_floats", "floats", "stored"]

ERROR, WARNING = Severity.ERROR, Severity.WARNING
_ROUNDING = 0.01
"""Relative difference of deq_scale that half precision explains."""


def stored(tensor: Stored) -> StoredArray:
    """A tensor of the file as an array of its dtype and shape."""
    return tensor.entry.array(tensor.source, ArraySpec(tensor.entry.shape, NUMPY[tensor.entry.dtype]))


def floats(tensor: Stored) -> F32:
    """Read a small tensor of floats as float32."""
    array = stored(tensor)
    rows = array.spec.shape[0] if array.spec.shape else 1
    return np.asarray(array.read(0, rows), np.float32)


def deq_floats(values: NDArray[Any]) -> F32:
    """deq_scale of either storage type as float32."""
    if values.dtype == np.int64:
        return np.ascontiguousarray((values & 0xFFFFFFFF).astype(np.uint32)).view(np.float32)
    return np.asarray(values, np.float32)


def check_layers(contents: Survey) -> Iterator[Finding]:
    """Findings about every layer that can be decoded according to the headers."""
    for linear in contents.linears.values():
        file = linear.parts["weight"].source.path.name
        try:
            for code, severity, part, message in _layer(contents, linear):
                yield Finding(code, severity, message, f"{linear.name}.{part}", file)
        except InputError as e:  # the file shrank, or the disk failed
            yield Finding("ASC008", ERROR, e.message, f"{linear.name}.weight", file)


_Problem = tuple[str, Severity, str, str]
"""Code, severity, part, message."""


def _layer(contents: Survey, linear: Linear) -> Iterator[_Problem]:
    yield from _scales(linear)
    yield from _codes(linear)
    if linear.codec.static:
        yield from _static(contents, linear)


def _scales(linear: Linear) -> Iterator[_Problem]:
    parts, limit = linear.parts, 2 ** (linear.codec.bits - 1)
    for part in ("weight_scale", "weight_scale_second"):
        if part in parts and (bad := _not_positive(floats(parts[part]))):
            yield "ASC023", ERROR, part, f"{bad:,} scales are not positive and finite"
    for part in ("weight_offset", "weight_offset_second"):
        if part in parts:
            values = np.asarray(stored(parts[part]).read(0, parts[part].entry.shape[0]), np.float64)
            if bad := int((~(np.rint(values) == values)).sum()):
                yield (
                    "ASC024",
                    ERROR,
                    part,
                    f"{bad:,} offsets are not integers, e.g. {values[np.rint(values) != values].flat[0]:g}",
                )
            elif ((values < -limit) | (values > limit - 1)).any():
                worst = values.flat[np.abs(values).argmax()]
                yield "ASC024", WARNING, part, f"offsets outside {-limit} to {limit - 1}, e.g. {worst:g}"


def _not_positive(values: F32) -> int:
    return int((~(np.isfinite(values) & (values > 0))).sum())


def _codes(linear: Linear) -> Iterator[_Problem]:
    codec = linear.codec
    if codec.bits == 4 and not codec.packing:
        array, (n, k) = stored(linear.parts["weight"]), linear.shape
        step = max(1, (1 << 22) // k)
        bad = 0
        for a in range(0, n, step):
            block = array.read(a, min(n, a + step))
            bad += int(((block < -8) | (block > 7)).sum())
        if bad:
            yield "ASC030", ERROR, "weight", f"{bad:,} codes are outside -8 to 7: packed two per byte?"
    if codec.sums:
        yield from _sums(linear, codec)


def _sums(linear: Linear, codec: MsModelSlim) -> Iterator[_Problem]:
    """Compare scale_bias with the decoded weight; with two scales per group the tool sums in half precision, which
    needs more tolerance.
    """
    parts = {p: stored(linear.parts[p]).read(0, linear.parts[p].entry.shape[0]) for p in codec.specs(linear.shape)}
    n, _ = linear.shape
    w = codec.dequantize(parts, linear.shape).reshape(n, codec.sums, -1)
    want = 8 * w.sum(2, dtype=np.float64)
    slack = (6e-2 if codec.second else 1e-3) * np.abs(w).sum(2, dtype=np.float64) + 1e-30
    bad = int((~(np.abs(parts["scale_bias"] - want) <= slack)).sum())
    if bad:
        yield "ASC031", ERROR, "scale_bias", f"{bad:,} of {want.size:,} are not 8 times the sum of their weights"


# ---------------------------------------------------------------- static layers


def _static(contents: Survey, linear: Linear) -> Iterator[_Problem]:
    parts = linear.parts
    scale, offset = floats(parts["input_scale"]), floats(parts["input_offset"])
    if _not_positive(scale):
        yield "ASC025", ERROR, "input_scale", f"is {scale[0]:g}, not positive and finite"
    if not (np.rint(offset[0]) == offset[0] and -128 <= offset[0] <= 127):
        yield "ASC025", ERROR, "input_offset", f"is {offset[0]:g}, not an integer from -128 to 127"
    raw = stored(parts["deq_scale"]).read(0, parts["deq_scale"].entry.shape[0])
    yield from _storage(contents, raw)
    if raw.dtype == np.int64 and (wide := int(((raw < 0) | (raw > 0xFFFFFFFF)).sum())):
        yield (
            "ASC026",
            ERROR,
            "deq_scale",
            f"{wide:,} values do not fit 32 bits, e.g. {raw[(raw < 0) | (raw > 0xFFFFFFFF)][0]}",
        )
        return
    deq = deq_floats(raw)
    if bad := _not_positive(deq):
        yield "ASC023", ERROR, "deq_scale", f"{bad:,} scales are not positive and finite"
        return
    if "weight_scale" in parts:
        yield from _product(scale, floats(parts["weight_scale"]).reshape(-1), deq)
    yield from _bias(contents, linear, deq, offset)


def _storage(contents: Survey, raw: NDArray[Any]) -> Iterator[_Problem]:
    model = contents.model_dtype
    if model is None:
        return
    dtype, where = model
    want = "float32" if dtype == "BF16" else "int64"
    if raw.dtype != np.dtype(want):
        severity = ERROR if where == "config.json" else WARNING
        yield "ASC029", severity, "deq_scale", f"is {raw.dtype}, but must be {want} for a {dtype} model ({where})"


def _product(scale: F32, weight_scale: F32, deq: F32) -> Iterator[_Problem]:
    want = closest_deq_scale(scale, weight_scale, deq)
    with np.errstate(all="ignore"):
        off = np.abs(deq.astype(np.float64) / want - 1)
    bad = int((~(off == 0)).sum())
    if bad:
        worst = float(np.nanmax(np.where(np.isfinite(off), off, np.inf)))
        severity = ERROR if worst > _ROUNDING else WARNING
        yield (
            "ASC027",
            severity,
            "deq_scale",
            f"{bad:,} of {len(deq):,} are not input_scale * weight_scale, with errors up to {worst:.2%}",
        )


def _bias(contents: Survey, linear: Linear, deq: F32, offset: F32) -> Iterator[_Problem]:
    n, k = linear.shape
    own = contents.plain.get(f"{linear.name}.bias")
    if own is not None and (own.entry.shape != (n,) or own.entry.dtype not in ("F32", "F16", "BF16")):
        yield "ASC021", ERROR, "bias", f"must be floats [{n}], found {own.entry.dtype} {list(own.entry.shape)}"
        return
    sums = row_sums(stored(linear.parts["weight"]), n, k)
    have = np.asarray(stored(linear.parts["quant_bias"]).read(0, n), np.float64)
    want = closest_quant_bias(floats(own) if own is not None else None, deq, offset, sums, have)
    off = np.abs(have - want)
    slack = 1 + 1e-6 * np.abs(want)  # one unit for float32 division, and its rounding of large values
    bad = int((~(off <= slack)).sum())
    if bad:
        worst = float(np.where(np.isfinite(off), off, np.inf).max())
        without = int((~(np.abs(have - quant_bias(None, deq, offset, sums)) <= slack)).sum())
        why = "; the layer's bias is not included" if own is not None and not without else ""
        yield (
            "ASC028",
            ERROR,
            "quant_bias",
            f"{bad:,} of {n:,} differ from the value for bias, offset and codes, by up to {worst:g}{why}",
        )
