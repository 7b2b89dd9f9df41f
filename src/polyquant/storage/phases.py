"""Time of a conversion by phase: seconds and bytes of each phase, summed over its threads.

    with profiled() as profile:
        ...  # phases are entered anywhere in the process: with phase("read", nbytes):
    profile.spent["read"].seconds

A phase inside another one counts for itself only. Without a profile a phase costs one comparison, with one about two
microseconds; a conversion enters a few per block of a million weights.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Self

__all__ = ["Profile", "Spent", "phase", "profiled", "waited"]


@dataclass(slots=True)
class Spent:
    """The sums of a phase. seconds: elapsed, without the phases inside; nbytes: bytes that it took or made."""

    seconds: float = 0.0
    nbytes: int = 0
    count: int = 0


class Profile:
    """The phases of a process while it is profiled. threads: of the conversion, whose phases run side by side."""

    def __init__(self) -> None:
        self.spent: dict[str, Spent] = {}
        self.threads = 1
        self._lock = threading.Lock()
        self._local = threading.local()

    def add(self, name: str, seconds: float, nbytes: int = 0) -> None:
        """Add to a phase."""
        with self._lock:
            spent = self.spent.setdefault(name, Spent())
            spent.seconds, spent.nbytes, spent.count = spent.seconds + seconds, spent.nbytes + nbytes, spent.count + 1

    @property
    def seconds(self) -> float:
        """The sum of all phases."""
        return sum(spent.seconds for spent in self.spent.values())

    @property
    def inside(self) -> list[float]:
        """The seconds of phases inside each open phase of this thread, innermost last."""
        found: list[float] | None = getattr(self._local, "inside", None)
        if found is None:
            found = self._local.inside = []
        return found


_active: Profile | None = None


class _Phase:
    """A phase of a profile."""

    __slots__ = ("_name", "_profile", "_start", "nbytes")

    def __init__(self, profile: Profile, name: str, nbytes: int) -> None:
        self._profile, self._name, self.nbytes = profile, name, nbytes
        self._start = 0.0

    def __enter__(self) -> Self:
        self._profile.inside.append(0.0)
        self._start = perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        elapsed, inside = perf_counter() - self._start, self._profile.inside
        own = elapsed - inside.pop()
        if inside:
            inside[-1] += elapsed
        self._profile.add(self._name, own, self.nbytes)


class _Off:
    """A phase without a profile."""

    nbytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...


def phase(name: str, nbytes: int = 0) -> AbstractContextManager[_Phase | _Off]:
    """Return a context manager that adds its time to a phase; `nbytes` of the entered object may be increased."""
    return _Off() if _active is None else _Phase(_active, name, nbytes)


def waited(threads: int, seconds: float, busy: float) -> None:
    """Add the phase "idle": the time of `threads` threads outside of jobs. seconds: elapsed; busy: of all jobs."""
    if _active is not None:
        _active.threads = threads
        _active.add("idle", max(0.0, threads * seconds - busy))


@contextmanager
def profiled() -> Iterator[Profile]:
    """Profile all threads of the process within the block; not inside another one."""
    global _active  # noqa: PLW0603 - phases are entered deep inside, by threads that know nothing of the profile
    assert _active is None
    _active = Profile()
    try:
        yield _active
    finally:
        _active = None
