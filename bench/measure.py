"""What a section of the benchmark is made of: rows, and medians of runs that take turns.

A section is a file `bench/bench_<name>.py` that holds one value:

    SECTION = Section(title="...", peers=("gguf",), rows=function)

`rows()` yields a Row for each thing measured. A section measures itself and its peer in the same process, run by run in turn, so that
a busy machine slows both; where the peer is not installed it still yields its rows, with `peer=None`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

__all__ = ["Row", "Section", "in_turn"]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table.

    ours, peer: what was measured, in `unit`; peer None: there is none here. bar: the ratio to reach, None if there is no promise.
    more: True if more is better (bytes per second), else less is (time, error, memory). extra: further columns, name -> number.
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
        """How many times better than the peer."""
        if self.peer is None:
            return None
        better, worse = (self.ours, self.peer) if self.more else (self.peer, self.ours)
        return better / worse if worse else float("inf")

    @property
    def met(self) -> bool | None:
        """True if the ratio reaches the bar; None where there is no bar or no peer."""
        return None if self.bar is None or self.ratio is None else self.ratio >= self.bar


@dataclass(frozen=True, slots=True)
class Section:
    """A table: its title, the modules it is measured against, and the function that measures."""

    title: str
    rows: Callable[[], Iterable[Row]]
    peers: tuple[str, ...] = ()


def in_turn(*runs: Callable[[], Any], repeats: int = 9, clock: Callable[[], float] = time.perf_counter) -> list[float]:
    """Median seconds of each run; a first round, which also warms up, is not counted.

    clock: for work on one thread that waits for nothing, `time.thread_time`, which a busy machine does not disturb.
    """
    seconds: list[list[float]] = [[] for _ in runs]
    for _ in range(repeats + 1):
        for run, taken in zip(runs, seconds, strict=True):
            start = clock()
            run()
            taken.append(clock() - start)
    return [median(taken[1:]) for taken in seconds]
