"""Compare two sides of one tensor in row blocks, and find the rows and columns beyond the codec's bound."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from polyquant.analysis.certification.bounds import REQUANTIZED, Bound, Bounds, requantized, unit_of
from polyquant.analysis.side import Reader, Side
from polyquant.ops.metrics import compares_stored, stored_unit_errors, unit_errors
from polyquant.types import F32, Affine, Floats, as_matrix

__all__ = ["Scan", "scan"]

_BLOCK = 1 << 21
_KEPT = 1 << 14
"""Rows beyond the bound that are kept; a tensor with more of them is wrong as a whole."""
_CHECKED = 1 << 12
"""Rows that are quantized again at most: if all of these are justified, so are the others."""
_UNPACKED = 1 << 28
"""Weights of a tensor whose affine codes are unpacked for their scales."""
_WRONG = 256
"""With more rows that are not justified, all rows beyond the bound count as wrong."""


@dataclass(slots=True)
class Scan:
    """The errors of one tensor. error: relative RMS. worst: largest relative error of a unit.

    rows: rows beyond the bound, ascending; columns: for each the mask of its units beyond the bound [n, units].
    """

    bound: Bound
    unit: int
    error: float = 0.0
    worst: float = 0.0
    equal: bool = True
    finite: bool = True
    requantized: bool = False
    rows: list[int] = field(default_factory=list)
    columns: list[NDArray[np.bool_]] = field(default_factory=list)

    @property
    def sound(self) -> bool:
        """True if no row is beyond the bound."""
        return not self.rows

    @property
    def snr(self) -> float:
        """Signal to noise ratio in dB."""
        return math.inf if self.error == 0 else -20 * math.log10(self.error)


def scan(expected: Side, actual: Side, bounds: Bounds) -> Scan:
    """Compare all values of a tensor. Both sides have the same shape."""
    rows, k = as_matrix(expected.shape)
    out = Scan(bounds.of(expected, actual), unit_of(k, actual.weights[0].codec))
    wanted, found = Reader(expected), Reader(actual)
    sums = _sums(wanted, found, k, out.unit)
    step = max(1, _BLOCK // max(1, k))
    total = lost = 0.0
    for start in range(0, rows, step):
        part = slice(start, min(rows, start + step))
        aa, dd = _block(out, sums(part), start)
        total, lost = total + aa, lost + dd
    out.error = math.sqrt(lost / total) if total > 0 else (0.0 if lost == 0 else math.inf)
    if out.rows and out.finite:
        _justify(out, wanted, found, actual)
    return out


def _sums(wanted: Reader, found: Reader, k: int, unit: int) -> Callable[[slice], F32]:
    """A function that returns the `unit_errors` of rows [a, b), from stored blocks where both sides are such."""
    a, b = wanted.blocks, found.blocks
    if a is None or b is None or not compares_stored(a, b, unit):
        return lambda part: unit_errors(wanted.rows(part), found.rows(part), unit)
    return lambda part: stored_unit_errors(a, wanted.stored(part), b, found.stored(part), unit, k // unit)


def _block(out: Scan, sums: F32, start: int) -> tuple[float, float]:
    """Check the sums [4, rows, units] of some rows; adds those beyond the bound. Returns sums of x^2 and (y - x)^2."""
    with np.errstate(invalid="ignore", over="ignore"):
        bad = _beyond(out, sums)
        aa, lost = float(sums[0].sum(dtype=np.float64)), float(sums[3].sum(dtype=np.float64))
    out.equal &= lost == 0
    if not math.isfinite(lost):
        out.finite = False
    elif lost:
        out.worst = max(out.worst, float(_relative(sums).max(initial=0)))
    if bad.any():
        for i in np.flatnonzero(bad.any(1))[: max(0, _KEPT - len(out.rows))]:
            out.rows.append(start + int(i))
            out.columns.append(bad[i])
    return aa, lost


def _relative(sums: F32) -> F32:
    """Error of each unit [rows, units], relative to its size or to the mean size of the row's units."""
    aa, dd = sums[0], sums[3]
    energy = np.maximum(aa, aa.mean(1, keepdims=True))
    return np.asarray(np.sqrt(dd / np.where(energy > 0, energy, np.inf)), np.float32)


def _gains(sums: F32) -> tuple[F32, NDArray[np.bool_]]:
    """(factor of the stored values in each row, mask of the rows that are not zero)."""
    row = sums[0].sum(1)
    return sums[2].sum(1) / np.where(row > 0, row, 1), row > 0


def _beyond(out: Scan, sums: F32) -> NDArray[np.bool_]:
    """Mask of the units beyond the bound [rows, units]."""
    bound = out.bound
    aa, bb, ab, dd = sums
    mean = aa.mean(1, keepdims=True)
    bad = ~(dd <= bound.unit**2 * np.maximum(aa, mean) + out.unit * bound.floor**2)
    if bound.cosine:
        close = (ab >= bound.cosine * np.sqrt(aa * bb)) & (bb > 0.05 * aa)
        bad |= (aa > 0.1 * mean) & ~close
    if bound.typical > 0.001:
        gain, strong = _gains(sums)
        off = ~(np.abs(gain - bound.gain) <= bound.slack) & strong
        bad |= (off & ~bad.any(1))[:, None]  # of the row as a whole, unless single units explain it
    return np.asarray(bad)


def _justify(out: Scan, wanted: Reader, found: Reader, actual: Side) -> None:
    """Quantize the rows beyond the bound with the target's codec, and keep those with a much larger stored error."""
    codec = actual.weights[0].codec
    if codec.form is Floats or not actual.op.keeps_rows([w.shape for w in actual.weights]):
        return
    k = as_matrix(actual.shape)[1]
    steps = _steps(actual)
    kept: list[int] = []
    step = max(1, _BLOCK // max(1, k))
    for start in range(0, min(len(out.rows), _CHECKED), step):
        index = out.rows[start : start + step]
        x, y = wanted.picked(index), found.picked(index)
        if steps is not None:
            kept += [start + i for i in _beyond_steps(out, x, y, steps[index])]
        elif (z := requantized(codec, x)) is not None:
            kept += [start + i for i in _unjustified(out, x, y, z)]
        else:
            return
        if len(kept) > _WRONG:
            return
    if not kept:
        out.rows, out.columns, out.requantized = [], [], True
    elif len(out.rows) <= _CHECKED:
        out.rows, out.columns = [out.rows[i] for i in kept], [out.columns[i] for i in kept]


def _steps(actual: Side) -> F32 | None:
    """The largest step of each row of affine codes [rows]; None for other codes."""
    weight = actual.weights[0]
    if weight.codec.form is not Affine or len(actual.weights) > 1 or math.prod(weight.shape) > _UNPACKED:
        return None
    scale = weight.codec.unpack(weight.read(), weight.shape).scale  # [rows, groups]
    rows = np.arange(as_matrix(actual.shape)[0])
    return np.asarray(np.abs(scale).max(1)[actual.op.needs(rows, [weight.shape])[0]], np.float32)


def _beyond_steps(out: Scan, x: F32, y: F32, steps: F32) -> list[int]:
    """Rows with an error that affine codes of these steps cannot have: rounded values are off by 0.29 steps RMS."""
    sums = unit_errors(x, y, out.unit)
    bad = ~(np.sqrt(sums[3] / out.unit) <= REQUANTIZED * 0.29 * steps[:, None])
    return [int(i) for i in np.flatnonzero(bad.any(1))]


def _unjustified(out: Scan, x: F32, y: F32, z: F32) -> list[int]:
    """Rows of x whose stored values y are much worse than new codes z."""
    stored, new = unit_errors(x, y, out.unit), unit_errors(x, z, out.unit)
    bad = ~(_relative(stored) <= np.maximum(REQUANTIZED * _relative(new), out.bound.unit))
    (gain, strong), (usual, _) = _gains(stored), _gains(new)
    if not out.bound.cosine:
        off = ~(np.abs(gain - usual) <= out.bound.slack) & strong
        bad |= (off & ~bad.any(1))[:, None]
    else:  # coarse codes: a wrong sign or a lost scale shows in direction and size, not in the error
        aa, ab, ac = stored[0], stored[2], new[2]
        least = 0.6 if out.bound.typical < 0.6 else 0.4
        bad |= (aa > 0.1 * aa.mean(1, keepdims=True)) & ~((ab >= 0.4 * ac) & (ab <= 2.5 * np.maximum(ac, 0)))
        off = ~((gain >= least * usual) & (gain <= usual / least)) & strong
        bad |= (off & ~bad.any(1))[:, None]
    return [int(i) for i in np.flatnonzero(bad.any(1))]
