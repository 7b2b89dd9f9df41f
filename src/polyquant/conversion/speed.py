"""The speed of this machine relative to the reference machine of cost_table.py, from a fraction of a second of work.

The codecs that dominate a plan are timed on random values, and so are the checksums that writing needs.
"""

from __future__ import annotations

import time
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from polyquant.capabilities import QuantizesStored
from polyquant.conversion.costs import Cost, codes_cost, step_costs
from polyquant.errors import PolyquantError
from polyquant.formats.steps import Step
from polyquant.ops import native
from polyquant.ops.metrics import error_sums
from polyquant.types import Action, Codec

__all__ = ["REFERENCE", "Speed", "measure_speed"]

_TIMED = 3
"""Pairs of codecs that are timed: those with the largest part of the cost."""
_SECONDS = 0.08
"""Least time of a measurement, and the size of its work."""
_ROWS, _K = 16, 1024
_CHECKSUM = 290
"""Picoseconds per byte of a checksum and a copy on the reference machine."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Time of this machine divided by that of the reference: of traffic, of each timed (source, target) codec, of
    others.
    """

    traffic: float = 1.0
    codes: Mapping[tuple[str, str], float] = field(default_factory=dict)
    others: float = 1.0

    def seconds(self, step: Step, cost: Cost) -> float:
        """Seconds of a step of this cost on one core of this machine."""
        source = step.source.name if step.source is not None else ""
        factor = self.codes.get((source, step.target.name), self.others)
        return (self.traffic * cost.traffic + factor * cost.codes) / 1e12


REFERENCE = Speed()
"""The machine of the cost table."""


def measure_speed(steps: Sequence[Step]) -> Speed:
    """Time the codecs with the largest part in the cost of these steps on one thread."""
    cost, pairs = Counter[tuple[str, str]](), dict[tuple[str, str], tuple[Codec, Codec]]()
    for step, found in zip(steps, step_costs(steps), strict=True):
        if step.source is not None and step.action in (Action.QUANTIZE, Action.REQUANTIZE, Action.DEQUANTIZE):
            key = step.source.name, step.target.name
            pairs[key] = step.source, step.target
            cost[key] += found.codes
    threads = native.threads()
    native.set_threads(1)
    try:
        timed = {key: _factor(*pairs[key]) for key, _ in cost.most_common(_TIMED)}
        traffic = _traffic()
    finally:
        native.set_threads(threads)
    codes = {key: factor for key, factor in timed.items() if factor is not None}
    weight = sum(cost[key] for key in codes)
    others = sum(cost[key] * factor for key, factor in codes.items()) / weight if weight else traffic
    return Speed(traffic, codes, others)


def _factor(source: Codec, target: Codec) -> float | None:
    """Time to requantize random values, divided by that of the cost table; None if a codec does not accept them."""
    expected = codes_cost(source, target)
    rows = _ROWS * max(1, round(_SECONDS / 2 * 1e12 / (expected * _ROWS * _K)))
    shape = min(rows, 1024), _K
    w = (np.random.default_rng(0).standard_normal(shape) * 0.02).astype(np.float32)
    try:
        parts = source.pack(source.quantize(w))

        def convert() -> None:
            fused = target if isinstance(target, QuantizesStored) and list(parts) == ["blocks"] else None
            if fused is None or fused.quantize_stored(source.name, parts["blocks"], shape) is None:
                x = source.dequantize(parts, shape)
                error_sums(x, target.dequantize(target.pack(target.quantize(x)), shape))

        return _shortest(convert) / (shape[0] * shape[1]) * 1e12 / expected
    except PolyquantError:
        return None


def _traffic() -> float:
    """Time of a checksum and a copy, divided by that of the reference."""
    data, copy = bytes(1 << 22), bytearray(1 << 22)

    def move() -> None:
        zlib.crc32(data)
        copy[:] = data

    return _shortest(move) / len(data) * 1e12 / _CHECKSUM


def _shortest(call: Callable[[], object]) -> float:
    """The shortest processor time of a call, over at least two calls and _SECONDS."""
    best, until, calls = np.inf, time.perf_counter() + _SECONDS, 0
    while calls < 2 or time.perf_counter() < until:
        start = time.thread_time()
        call()
        best, calls = min(best, time.thread_time() - start), calls + 1
    return float(best)
