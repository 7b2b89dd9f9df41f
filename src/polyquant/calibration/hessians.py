"""Hessians of linear layers from the inputs on a calibration text: collected stage by stage, returned on request, then
freed.

H = mean of x x^T over the tokens of the calibration text, [K, K]. A stage is a part of the model that runs at once (a
layer); it needs the outputs of the previous stage, which the model's side keeps. Memory: the Hessians of stages with
pending requests, one stage if tensors are requested in stage order. For experts: per stack 4 K^2 bytes per expert, or
the inputs of all tokens if these are smaller (the inputs of gate and up, which many experts share: 4 K bytes per
token).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from polyquant.calibration.statistics import CacheRanges
from polyquant.ops import exact
from polyquant.types import F32

__all__ = [
    "LEAST_INPUTS",
    "UNREACHED",
    "Gatherer",
    "GatheringStages",
    "Hessians",
    "Holder",
    "Moments",
    "Stages",
    "Tick",
    "part_of",
]

LEAST_INPUTS = 64
"""With fewer inputs (experts that the text hardly reaches) the Hessian is not used."""
UNREACHED = "reached by no token of the calibration text"
"""The note about an expert without inputs."""


def too_few(count: int) -> str:
    """Explain why a weight with few inputs is not calibrated."""
    why = f"{count} inputs seen, fewer than {LEAST_INPUTS}" if count else UNREACHED
    return f"not calibrated: {why}"


Tick = Callable[[float], None]


def part_of(tick: Tick, index: int, count: int) -> Tick:
    """A tick for part `index` of `count`."""
    return lambda share: tick((index + share) / count)


class Gatherer(Protocol):
    """Accumulates the inputs of a linear layer."""

    def add(self, x: F32) -> None:
        """Add inputs x [T, K]."""

    def merge(self, other: Any) -> None:
        """Add what another one of this class, which is not used afterwards, has gathered from later windows."""


G = TypeVar("G", bound=Gatherer)


@runtime_checkable
class Holder(Gatherer, Protocol):
    """A Gatherer that can keep shared inputs by reference, if these are smaller than the statistics."""

    def hold(self, x: F32, rows: NDArray[np.intp]) -> None:
        """Keep rows of x [T, K] by reference; x must not change afterwards."""


class Moments:
    """Mean of x x^T over all inputs, and their count.

    float32 [K, K], or shared input rows until it is requested.
    """

    def __init__(self, k: int) -> None:
        self.count, self._k = 0, k
        self._total: F32 | None = None
        self._held: list[tuple[F32, NDArray[np.intp]]] = []

    def add(self, x: F32) -> None:
        """Add inputs x [T, K]."""
        product = exact.gram(x)
        self._total = product if self._total is None else np.add(self._total, product, out=self._total)
        self.count += len(x)

    def hold(self, x: F32, rows: NDArray[np.intp]) -> None:
        """See Holder."""
        self._held.append((x, rows))
        self.count += len(rows)

    def merge(self, other: Moments) -> None:
        """See Gatherer."""
        if other._total is not None:
            self._total = other._total if self._total is None else self._total + other._total
        self._held += other._held
        self.count += other.count

    def parts(self) -> dict[str, Any]:
        """See calibration/shared.py: Kept."""
        return {"k": self._k, "count": self.count, "total": self._total, "held": [list(h) for h in self._held]}

    @classmethod
    def restored(cls, parts: Mapping[str, Any]) -> Moments:
        """See calibration/shared.py: Kept."""
        out = cls(parts["k"])
        out.count, out._total, out._held = parts["count"], parts["total"], [(x, rows) for x, rows in parts["held"]]
        return out

    @property
    def hessian(self) -> F32:
        """The mean, [K, K]."""
        total = np.zeros((self._k, self._k), np.float32) if self._total is None else self._total
        if self._held:
            x = np.concatenate([x[rows] for x, rows in self._held])
            total = total + exact.gram(x)
        return np.asarray(total / np.float32(max(1, self.count)), np.float32)


class Stages(Protocol):
    """A float model that runs over the calibration text stage by stage."""

    @property
    def names(self) -> Sequence[Sequence[str]]:
        """Tensors whose inputs each stage sees, by their names in the checkpoint."""

    def run(self, index: int, wanted: frozenset[str], tick: Tick) -> Mapping[str, Moments]:
        """Run a stage; stages run in order. Tensors that share an input share their moments. Only `wanted` tensors are
        collected.

        tick: called now and then with the finished share of the stage, from 0 to 1.
        """

    def expect(self, requests: frozenset[str]) -> None:
        """Called before the first stage with the tensors whose moments will be used; others may be left out."""


class GatheringStages(Stages, Protocol):
    """Stages that can gather other statistics than moments."""

    def gather(
        self, index: int, wanted: frozenset[str], tick: Tick, make: Callable[[int], G], cache: CacheRanges | None = None
    ) -> Mapping[str, G]:
        """Like `run`. make: K -> a Gatherer, called with one window at a time. cache: receives keys and values of the
        stage's attention.
        """


class Hessians:
    """Hessians by tensor, from any thread.

    wanted: the tensors that will be requested, each listed once per request (several targets may be rows of one
    source); others are not collected, except `others`, which other processes request (calibration/shared.py). tick:
    called with the finished share of the needed stages; an exception from it ends the calibration.
    """

    def __init__(
        self, stages: Stages, wanted: Iterable[str], tick: Tick | None = None, others: Iterable[str] = ()
    ) -> None:
        self._stages, self._left, self._tick = stages, Counter(iter(wanted)), tick
        self.wanted = frozenset(self._left) | frozenset(others)
        self._stage_of = {name: i for i, names in enumerate(stages.names) for name in names}
        self._last = max((i for name, i in self._stage_of.items() if name in self._left), default=0)
        self._held: dict[str, Moments] = {}
        self._next = 0
        self._lock = threading.Lock()
        stages.expect(frozenset(self._left))

    def order(self, name: str) -> int:
        """The stage of a tensor; request in this order. Tensors without inputs come last."""
        return self._stage_of.get(name, len(self._stages.names))

    def of(self, name: str) -> tuple[F32 | None, str]:
        """Return (Hessian [K, K], "") or (None, reason). Runs the stages up to the tensor's. Raises KeyError for too
        many requests.
        """
        if name not in self._stage_of:
            return None, "not calibrated: the model gives it no inputs"
        with self._lock:
            while self._next <= self._stage_of[name]:
                found = self._stages.run(self._next, self.wanted, self._report)
                self._held |= {n: moments for n, moments in found.items() if n in self._left}
                self._next += 1
            self._left[name] -= 1
            moments = self._held[name] if self._left[name] > 0 else self._held.pop(name)
        if moments.count < LEAST_INPUTS:
            return None, too_few(moments.count)
        return moments.hessian, ""

    def _report(self, share: float) -> None:
        if self._tick is not None:
            self._tick((self._next + share) / (self._last + 1))
