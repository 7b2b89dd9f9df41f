"""Error bounds of codecs: how far stored values may differ from the values that they represent.

Errors are checked per unit, up to 256 consecutive values of a row (the blocks of most codecs divide one), and per row:

    unit    sum (stored - expected)^2 <= bound^2 * max(sum expected^2, mean of the row's units)
    row     |<stored, expected> / <expected, expected> - gain| <= slack        a scale, a sign

The bound is a multiple of the error that the codec causes on Gaussian values, measured once per codec, or the rounding
of the type where no quantization is expected: floats, equal codecs, ternary codes of ternary values. Real weights have
outliers, and their error may be larger. Rows beyond the bound are therefore quantized with the target's codec, and pass
if the stored error is at most REQUANTIZED times that of the new codes: calibrated codes (GPTQ, LDLQ) trade weight error
for output error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from polyquant.analysis.side import Side
from polyquant.capabilities import MayOnlyRead, Opaque, WithBits
from polyquant.errors import PolyquantError
from polyquant.operations import Same
from polyquant.types import F32, Codec, Floats, as_matrix

__all__ = ["REQUANTIZED", "Bound", "Bounds", "requantized", "unit_of"]

REQUANTIZED = 2.5
_UNIT = 2.2
"""Multiple of the Gaussian error allowed in a unit."""
_FLOATS = {"f64": 3e-7, "f32": 3e-7, "f16": 2.0**-11, "bf16": 2.0**-8}
_TERNARY = 0.006
"""The scale of ternary codes may be rounded to bfloat16."""
_VALUES = 8.0
"""An operation on values, such as the exponential of a decay, magnifies rounding."""
_SAMPLE_ROWS, _SAMPLE_COLUMNS = 64, 1024


@dataclass(frozen=True, slots=True)
class Bound:
    """unit: largest relative error of a unit. gain: that of a row, with its slack. floor: absolute error per value.

    typical: relative error on Gaussian values. cosine: least cosine of a unit for codecs whose errors are as large as
    the values, 0 to skip this check.
    """

    unit: float
    typical: float
    gain: float = 1.0
    slack: float = math.inf
    floor: float = 0.0
    cosine: float = 0.0


def unit_of(k: int, codec: Codec) -> int:
    """Columns of a unit: a power of two that divides the row, at least a block; else the row."""
    block = codec.granule[1]
    for width in (256, 128, 64, 32):
        if k % width == 0 and (width <= 128 or block > 128):
            return width
    return max(1, k)


class Bounds:
    """Bounds by codec, measured on first use."""

    def __init__(self) -> None:
        self._typical: dict[tuple[str, int], tuple[float, float, float]] = {}

    def of(self, expected: Side, actual: Side) -> Bound:
        """The bound of a tensor."""
        codecs = {w.codec.name: w.codec for w in actual.weights}.values()
        bounds = [self._of_codec(expected, actual, c) for c in codecs]
        bound = max(bounds, key=lambda b: b.unit)
        if not actual.op.moves or not expected.op.moves:
            bound = Bound(bound.unit * _VALUES, bound.typical, floor=bound.floor, cosine=bound.cosine)
        return replace(bound, unit=max(bound.unit, expected.slack), slack=max(bound.slack, expected.slack))

    def _of_codec(self, expected: Side, actual: Side, codec: Codec) -> Bound:
        if codec.form is Floats and (rounding := _FLOATS.get(codec.name)) is not None:
            # f16 has a fixed step below 6e-5; a float of a float is rounded once
            return Bound(rounding, rounding, 1.0, 4 * rounding, floor=3e-8 if codec.name == "f16" else 0.0)
        if expected.is_ternary and actual.is_ternary:
            return Bound(_TERNARY, _TERNARY / 2, 1.0, _TERNARY)
        mine = {w.codec.name for w in expected.weights}
        if mine == {codec.name} and isinstance(expected.op, Same) and isinstance(actual.op, Same):
            return Bound(2.0**-8, 0.0, 1.0, 2.0**-8)
        typical, gain, cosine = self._measured(codec, as_matrix(actual.shape)[1])
        slack = 0.01 + typical / 4 + 1.5 * typical**2
        return Bound(_UNIT * typical, typical, gain, slack, cosine=cosine / 2 if typical >= 0.25 else 0.0)

    def _measured(self, codec: Codec, k: int) -> tuple[float, float, float]:
        """(relative error, gain, cosine) on Gaussian values."""
        rows, block = codec.granule
        columns = max(block, min(k, _SAMPLE_COLUMNS) // block * block)
        key = codec.name, columns
        if key not in self._typical:
            shape = -(-_SAMPLE_ROWS // rows) * rows, columns
            x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
            y = requantized(codec, x)
            if y is None:
                error = 1.7 / (2.0 ** _bits(codec) - 1)
                self._typical[key] = error, 1.0, math.sqrt(max(0.0, 1 - error**2))
            else:
                d, aa = y - x, float((x * x).sum())
                norm = math.sqrt(aa * float((y * y).sum())) or 1.0
                dot = float((x * y).sum())
                self._typical[key] = math.sqrt(float((d * d).sum()) / aa), dot / aa, dot / norm
        return self._typical[key]


def _bits(codec: Codec) -> float:
    """Bits of a code, for codecs that are only read."""
    if isinstance(codec, WithBits):
        return codec.bits
    rows, block = codec.granule
    shape = (rows * 16, block * 16)
    return max(2.0, math.floor(8 * sum(s.nbytes for s in codec.specs(shape).values()) / math.prod(shape)))


def requantized(codec: Codec, x: F32) -> F32 | None:
    """x [n, K] quantized and decoded again; None if the codec cannot quantize it."""
    if isinstance(codec, Opaque) or (isinstance(codec, MayOnlyRead) and not codec.writable):
        return None
    rows = codec.granule[0]
    padded = np.concatenate([x, np.repeat(x[-1:], -len(x) % rows, 0)]) if len(x) % rows else x
    try:
        parts = codec.pack(codec.quantize(np.ascontiguousarray(padded)))
        return codec.dequantize(parts, padded.shape)[: len(x)]
    except PolyquantError:
        return None
