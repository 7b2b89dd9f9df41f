"""Statistics and histogram of one tensor, from a sample of its rows or from all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from polyquant.analysis.side import Reader, Side
from polyquant.types import F32, Shape, Ternary, as_matrix

__all__ = [
    "BINS",
    "OUTLIER",
    "Statistics",
    "bar_counts",
    "edge_of",
    "median",
    "sampled",
    "statistics",
    "ternary_counts",
]

BINS = 41
"""Bars of a histogram of weights."""
OUTLIER = 6
"""Standard deviations from which on a weight is an outlier."""
_SAMPLED = 1 << 18
"""Weights of a sample, in whole rows spread evenly."""
_BLOCK = 1 << 20

OnRows = Callable[[int, int], None]
"""Called with (rows done, all rows) after each block; may raise to stop."""


def median(values: ArrayLike) -> float:
    """The median of some numbers; NaN if one is NaN or there are none. np.median imports np.ma, which takes 20 ms."""
    x = np.sort(np.asarray(values, np.float64), axis=None)
    half = len(x) // 2
    return float("nan") if not len(x) or np.isnan(x[-1]) else float(x[half] + x[half - 1 + len(x) % 2]) / 2


@dataclass(frozen=True, slots=True)
class Statistics:
    """Figures of the finite values of a tensor.

    values: how many were read, of `total`; invalid: how many of them are NaN or infinite; zeros, outliers: shares;
    counts: histogram in BINS bars between -edge and edge; codes: counts of the ternary codes -1, 0, 1, or None.
    """

    values: int
    total: int
    invalid: int
    smallest: float
    largest: float
    mean: float
    deviation: float
    zeros: float
    outliers: float
    edge: float
    counts: tuple[int, ...]
    codes: tuple[int, ...] | None

    @property
    def is_sample(self) -> bool:
        """True if not all values were read."""
        return self.values < self.total


def statistics(
    side: Side, *, every: bool = False, edge: float | None = None, on_rows: OnRows = lambda done, total: None
) -> Statistics:
    """Measure a tensor: a sample, or with `every` all values, in blocks. Raises PolyquantError.

    edge: of the histogram, to compare it with another one; by default it is chosen for these values.
    """
    rows, k = as_matrix(side.shape)
    reader = Reader(side)
    x = sampled(reader, side.shape)
    deviation, own = _spread(x)
    sums = _Sums(deviation, own if edge is None else edge)
    if every and rows * k > x.size:
        step = max(1, _BLOCK // max(1, k))
        for start in range(0, rows, step):
            stop = min(rows, start + step)
            sums.add(reader.rows(slice(start, stop)))
            on_rows(stop, rows)
    else:
        sums.add(x)
    return sums.result(rows * k, ternary_counts(side))


def sampled(reader: Reader, shape: Shape) -> F32:
    """About _SAMPLED values of whole rows, spread evenly."""
    rows, k = as_matrix(shape)
    if not rows * k:
        return np.empty(0, np.float32)
    wanted = np.unique(np.linspace(0, rows - 1, max(1, min(rows, _SAMPLED // max(1, k)))).astype(np.int64))
    return reader.rows(wanted).reshape(-1)


def edge_of(values: NDArray[np.float32], deviation: float) -> float:
    """The edge of a symmetric histogram of finite values; outliers lie outside."""
    return float(min(np.abs(values).max(initial=0.0), OUTLIER * deviation)) or 1.0


def bar_counts(values: NDArray[np.float32], edge: float) -> tuple[int, ...]:
    """Counts in BINS bars; values beyond the edges count in the outer bars."""
    counts, _ = np.histogram(np.clip(values, -edge, edge), BINS, (-edge, edge))
    return tuple(int(n) for n in counts)


def ternary_counts(side: Side) -> tuple[int, ...] | None:
    """Counts of the codes -1, 0, 1 in the first rows of a ternary tensor, or in all if it cannot be read by rows; None
    for other tensors.
    """
    if len(side.weights) != 1 or side.weights[0].codec.form is not Ternary:
        return None
    rows, k = as_matrix(side.shape)
    weight = side.weights[0]
    if weight.codec.row_sliced:
        stop = min(rows, max(1, _SAMPLED // max(1, k)))
        found = weight.codec.unpack(weight.read(slice(0, stop)), (stop, k)).codes
    else:
        found = weight.codec.unpack(weight.read(), weight.shape).codes
    return tuple(int((found == code).sum()) for code in (-1, 0, 1))


def _spread(x: F32) -> tuple[float, float]:
    finite = x[np.isfinite(x)]
    deviation = float(finite.std(dtype=np.float64)) if finite.size else 0.0
    return deviation or 1.0, edge_of(finite, deviation or 1.0)


class _Sums:
    """Sums of blocks of values."""

    def __init__(self, deviation: float, edge: float) -> None:
        self.deviation, self.edge = deviation, edge
        self.values = self.invalid = self.zeros = self.outliers = 0
        self.sum = self.squares = 0.0
        self.smallest, self.largest = np.inf, -np.inf
        self.counts = np.zeros(BINS, np.int64)

    def add(self, block: F32) -> None:
        x = block.reshape(-1)
        self.values += x.size
        finite = np.isfinite(x)
        if not finite.all():
            x = x[finite]
            self.invalid += int(block.size - x.size)
        if not x.size:
            return
        self.zeros += int((x == 0).sum())
        self.outliers += int((np.abs(x) > OUTLIER * self.deviation).sum())
        self.sum += float(x.sum(dtype=np.float64))
        self.squares += float(np.square(x, dtype=np.float64).sum())
        self.smallest, self.largest = min(self.smallest, float(x.min())), max(self.largest, float(x.max()))
        self.counts += np.array(bar_counts(x, self.edge))

    def result(self, total: int, codes: tuple[int, ...] | None) -> Statistics:
        n = self.values - self.invalid
        mean = self.sum / n if n else 0.0
        return Statistics(
            values=self.values,
            total=total,
            invalid=self.invalid,
            smallest=float(self.smallest) if n else 0.0,
            largest=float(self.largest) if n else 0.0,
            mean=mean,
            deviation=max(0.0, self.squares / n - mean * mean) ** 0.5 if n else 0.0,
            zeros=self.zeros / n if n else 0.0,
            outliers=self.outliers / n if n else 0.0,
            edge=self.edge,
            counts=tuple(int(c) for c in self.counts),
            codes=codes,
        )
