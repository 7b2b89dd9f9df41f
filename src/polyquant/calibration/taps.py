"""Taps replace a layer's linears and stacks of experts for a while: they record the inputs and compute the same
outputs.

An expert reads the tokens that were routed to it. Its statistics are allocated on its first token, so that unreached
experts cost no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeAlias

import numpy as np

from polyquant.calibration.hessians import G, Holder
from polyquant.ops.experts import Ids
from polyquant.runtime.decoder import Layer
from polyquant.runtime.expert_linear import ExpertLinear
from polyquant.runtime.linear import Linear
from polyquant.runtime.site import Place
from polyquant.types import F32

__all__ = ["ExpertTap", "LinearTap", "Tap", "tapped", "taps_of"]


class LinearTap(Generic[G]):
    """A linear layer whose inputs are gathered."""

    def __init__(self, linear: Linear, wanted: Collection[str], make: Callable[[int], G]) -> None:
        self.linear, self._inputs = linear, make(linear.weights[0].shape[1])
        self._names = [w.name for w in linear.weights if w.name in wanted]

    def __call__(self, x: F32) -> Sequence[F32]:
        """Call the linear layer."""
        self.add(x)
        return self.linear(x)

    def add(self, x: F32) -> None:
        """Add inputs [T, K] without computing outputs."""
        self._inputs.add(x)

    @property
    def gathered(self) -> dict[str, G]:
        """Tensor name -> its gathered inputs; tensors that share an input share the object."""
        return dict.fromkeys(self._names, self._inputs)


class ExpertTap(Generic[G]):
    """Stacks of experts whose inputs are gathered per expert. tokens: upper bound of the tokens of all windows."""

    def __init__(self, linear: ExpertLinear, wanted: Collection[str], make: Callable[[int], G], tokens: int) -> None:
        self.linear, self._make, self._tokens = linear, make, tokens
        names = ((e, [n for n in linear.names(e) if n in wanted]) for e in range(linear.experts))
        self._names = {e: wanted_names for e, wanted_names in names if wanted_names}
        self._inputs: dict[int, G] = {}

    def __call__(self, x: F32, ids: Ids) -> Sequence[F32]:
        """Call the stacks: x [T, K], or [A, K] with a row per assignment; ids [T, used]."""
        each = ids.size // len(x) if len(x) else 1
        chosen = ids.reshape(-1)
        held = None
        for e in np.unique(chosen).tolist():
            if e not in self._names:
                continue
            inputs = self._of(e)
            rows = np.flatnonzero(chosen == e) // each
            if isinstance(inputs, Holder) and self._holds(len(x) / max(1, len(ids))):
                held = x.copy() if held is None else held
                inputs.hold(held, rows)
            else:
                inputs.add(x[rows])
        return self.linear(x, ids)

    def _of(self, e: int) -> G:
        if e not in self._inputs:
            self._inputs[e] = self._make(self.linear.cols)
        return self._inputs[e]

    def _holds(self, rows: float) -> bool:
        """True if the inputs of all tokens, `rows` per token, are smaller than [K, K] of every expert."""
        return self._tokens * rows <= len(self._names) * self.linear.cols

    @property
    def wanted(self) -> bool:
        """True if any tensor of the stacks is wanted."""
        return bool(self._names)

    @property
    def gathered(self) -> dict[str, G]:
        """Tensor name -> its gathered inputs; empty for an expert that no token reached."""
        return {name: self._of(e) for e, names in self._names.items() for name in names}


Tap: TypeAlias = LinearTap[G] | ExpertTap[G]


def taps_of(layer: Layer, wanted: Collection[str], make: Callable[[int], G], tokens: int) -> list[tuple[Place, Tap[G]]]:
    """A tap for each place of the layer that uses tensors of these names."""
    places = ((place, place.linear) for place in (*layer.places, *layer.reads))
    read = [(p, LinearTap(v, wanted, make)) for p, v in places if any(w.name in wanted for w in v.weights)]
    chosen = ((place, ExpertTap(place.linear, wanted, make, tokens)) for place in layer.stacks)
    return [*read, *((place, tap) for place, tap in chosen if tap.wanted)]


@contextmanager
def tapped(taps: Sequence[tuple[Place, Tap[G]]]) -> Iterator[None]:
    """Install the taps within the block."""
    for place, tap in taps:
        place.put(tap)
    try:
        yield
    finally:
        for place, tap in taps:
            place.put(tap.linear)
