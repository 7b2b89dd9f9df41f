"""Rows and sections of the benchmark, and medians of alternating runs.

A section is a file `bench/bench_<name>.py` with one value:

    SECTION = Section(title="...", peers=("gguf",), rows=function)

`rows()` yields one Row per measurement. A section measures polyquant and its peer in the same process in alternating
runs, so that a busy machine slows both; without the peer installed it still yields its rows, with `peer=None`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any

__all__ = ["Row", "Section", "in_turn", "middle", "noise"]

_spreads: list[float] = []  # of the medians since the last call of `noise`


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table.

    ours, peer: measured values in `unit`; peer None: not available. bar: the ratio to reach, None for no requirement.
    more: True if higher is better (bytes per second), False for time, error, memory. extra: more columns, name ->
    value.
    """

    name: str
    unit: str
    ours: float
    peer: float | None = None
    bar: float | None = None
    more: bool = False
    extra: Mapping[str, float] = field(default_factory=dict)

    @property
    def ratio(self) -> float | None:
        """Ratio by which polyquant is better than the peer."""
        if self.peer is None:
            return None
        better, worse = (self.ours, self.peer) if self.more else (self.peer, self.ours)
        return better / worse if worse else float("inf")

    @property
    def met(self) -> bool | None:
        """True if the ratio reaches the bar; None without a bar or peer."""
        return None if self.bar is None or self.ratio is None else self.ratio >= self.bar


@dataclass(frozen=True, slots=True)
class Section:
    """A table: title, peers (modules), and the measuring function."""

    title: str
    rows: Callable[[], Iterable[Row]]
    peers: tuple[str, ...] = ()


def in_turn(*runs: Callable[[], Any], repeats: int = 9, clock: Callable[[], float] = time.perf_counter) -> list[float]:
    """Return the median seconds of each run, after an uncounted warm-up round.

    Idle threads of OpenMP and BLAS spin for up to 20 ms after their work, on the processors of the next run. So a short
    run begins with a rest, and with an uncounted call that wakes its own threads.
    clock: `time.thread_time` for single-threaded work without waiting, which a busy machine does not distort.
    """
    rest = len(runs) > 1 and clock is time.perf_counter
    seconds: list[list[float]] = [[] for _ in runs]
    for _ in range(repeats + 1):
        for run, taken in zip(runs, seconds, strict=True):
            if rest and taken and taken[-1] < 0.1:
                time.sleep(0.03)
                run()
            start = clock()
            run()
            taken.append(clock() - start)
    return [middle(taken[1:]) for taken in seconds]


def middle(values: Sequence[float]) -> float:
    """Return the median of repeated measurements, and remember how far they are apart."""
    found = median(values)
    if len(values) > 1 and found:
        low, _, high = quantiles(values, n=4, method="inclusive")
        _spreads.append((high - low) / 2 / found)
    return found


def noise() -> float | None:
    """Return the largest relative spread (half of the interquartile range) of the medians since the last call, None if
    there were none."""
    found = max(_spreads, default=None)
    _spreads.clear()
    return found
