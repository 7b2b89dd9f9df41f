"""Hessians of linear layers from the inputs that a text gives them: collected stage by stage, handed out as they are asked for, and forgotten.

H = mean of x x^T over the tokens of the calibration text, [K, K]. A stage is as much of the model as runs at once (a layer); what it needs of the
stages before it are their outputs, which the model's side keeps. Memory: the Hessians of the stages that are still asked for, one where the
tensors are asked for in the order of the stages. Of a stage's experts: for each stack 4 K^2 bytes an expert, or the inputs of all tokens where these are
smaller (those of gate and up, which many experts share: 4 K bytes a token).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from polyquant.calibration.statistics import CacheRanges
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
]

LEAST_INPUTS = 64
"""Of fewer inputs (experts that the text hardly reaches) the Hessian is left aside."""
UNREACHED = "reached by no token of the calibration text"
"""What is said of an expert that has no inputs at all."""


def too_few(count: int) -> str:
    """Why a weight is not calibrated that so few inputs reached."""
    why = f"{count} inputs seen, fewer than {LEAST_INPUTS}" if count else UNREACHED
    return f"not calibrated: {why}"


Tick = Callable[[float], None]


class Gatherer(Protocol):
    """What is kept of the inputs of a linear layer."""

    def add(self, x: F32) -> None:
        """x [T, K]."""


G = TypeVar("G", bound=Gatherer)


@runtime_checkable
class Holder(Gatherer, Protocol):
    """The same, where it may be smaller to keep inputs that many share than what is made of them."""

    def hold(self, x: F32, rows: NDArray[np.intp]) -> None:
        """Rows of x [T, K], which nobody changes any more."""


class Moments:
    """Mean of x x^T over the inputs seen, and their number: float32 [K, K], or rows of inputs that several share until it is asked for."""

    def __init__(self, k: int) -> None:
        self.count, self._k = 0, k
        self._total: F32 | None = None
        self._held: list[tuple[F32, NDArray[np.intp]]] = []

    def add(self, x: F32) -> None:
        """x [T, K]."""
        product = x.T @ x
        self._total = product if self._total is None else np.add(self._total, product, out=self._total)
        self.count += len(x)

    def hold(self, x: F32, rows: NDArray[np.intp]) -> None:
        """See Holder."""
        self._held.append((x, rows))
        self.count += len(rows)

    @property
    def hessian(self) -> F32:
        """The mean, [K, K]."""
        total = np.zeros((self._k, self._k), np.float32) if self._total is None else self._total
        if self._held:
            x = np.concatenate([x[rows] for x, rows in self._held])
            total = total + x.T @ x
        return np.asarray(total / np.float32(max(1, self.count)), np.float32)


class Stages(Protocol):
    """A float model on its way through the calibration text."""

    @property
    def names(self) -> Sequence[Sequence[str]]:
        """The tensors whose inputs each stage sees, by their names in the checkpoint."""

    def run(self, index: int, wanted: frozenset[str], tick: Tick) -> Mapping[str, Moments]:
        """Run a stage, from the first on one after the other; tensors that share an input share their moments. Other than `wanted` are left out.

        tick: told now and then which share of the stage is done, from 0 to 1.
        """


class GatheringStages(Stages, Protocol):
    """The same, and other things can be gathered than moments."""

    def gather(
        self, index: int, wanted: frozenset[str], tick: Tick, make: Callable[[int], G], cache: CacheRanges | None = None
    ) -> Mapping[str, G]:
        """As `run`. make: K -> what gathers inputs [T, K], told one window after the other. cache: told what the stage's attention keeps."""


class Hessians:
    """Hessians by tensor, for one request each, from any thread.

    wanted: the tensors that will be asked for, each as often as it will be (several targets may be rows of one source); others are not collected. tick: told the share of the stages needed that is done; what it raises ends the
    calibration.
    """

    def __init__(self, stages: Stages, wanted: Iterable[str], tick: Tick | None = None) -> None:
        self._stages, self._left, self._tick = stages, Counter(iter(wanted)), tick
        self.wanted = frozenset(self._left)
        self._stage_of = {name: i for i, names in enumerate(stages.names) for name in names}
        self._last = max((i for name, i in self._stage_of.items() if name in self.wanted), default=0)
        self._held: dict[str, Moments] = {}
        self._next = 0
        self._lock = threading.Lock()

    def order(self, name: str) -> int:
        """The stage of a tensor: ask in this order. Tensors that the model does not multiply with come last."""
        return self._stage_of.get(name, len(self._stages.names))

    def of(self, name: str) -> tuple[F32 | None, str]:
        """(Hessian [K, K], "") or (None, why there is none). Runs the stages up to the tensor's. Raises KeyError for one request too many."""
        if name not in self._stage_of:
            return None, "not calibrated: the model gives it no inputs"
        with self._lock:
            while self._next <= self._stage_of[name]:
                self._held.update(self._stages.run(self._next, self.wanted, self._told))
                self._next += 1
            self._left[name] -= 1
            found = self._held[name] if self._left[name] > 0 else self._held.pop(name)
        if found.count < LEAST_INPUTS:
            return None, too_few(found.count)
        return found.hessian, ""

    def _told(self, share: float) -> None:
        if self._tick is not None:
            self._tick((self._next + share) / (self._last + 1))
