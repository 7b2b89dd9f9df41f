"""Taps: in place of a layer's linears and stacks of experts for a while, they tell what these read, and compute what they did.

An expert reads the tokens that were routed to it. What is gathered of it is made when the first of them comes, so that experts which a text does
not reach cost nothing.
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
    """A linear whose inputs are gathered."""

    def __init__(self, linear: Linear, wanted: Collection[str], make: Callable[[int], G]) -> None:
        self.linear, self._inputs = linear, make(linear.weights[0].shape[1])
        self._names = [w.name for w in linear.weights if w.name in wanted]

    def __call__(self, x: F32) -> Sequence[F32]:
        """As the linear."""
        self.add(x)
        return self.linear(x)

    def add(self, x: F32) -> None:
        """Inputs [T, K] of which the linear gives nothing."""
        self._inputs.add(x)

    @property
    def gathered(self) -> dict[str, G]:
        """Tensor's name -> what it read; tensors that share an input share it."""
        return dict.fromkeys(self._names, self._inputs)


class ExpertTap(Generic[G]):
    """Stacks whose inputs are gathered expert by expert. tokens: how many all windows have, at most."""

    def __init__(self, linear: ExpertLinear, wanted: Collection[str], make: Callable[[int], G], tokens: int) -> None:
        self.linear, self._make, self._tokens = linear, make, tokens
        names = ((e, [n for n in linear.names(e) if n in wanted]) for e in range(linear.experts))
        self._names = {e: found for e, found in names if found}
        self._inputs: dict[int, G] = {}

    def __call__(self, x: F32, ids: Ids) -> Sequence[F32]:
        """As the stacks: x [T, K], or [A, K] with a row for each assignment; ids [T, used]."""
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
        """True where the inputs of all tokens, `rows` for each, are smaller than [K, K] of every expert."""
        return self._tokens * rows <= len(self._names) * self.linear.cols

    @property
    def wanted(self) -> bool:
        """True if any of the stacks' tensors is."""
        return bool(self._names)

    @property
    def gathered(self) -> dict[str, G]:
        """The same. An expert that no token reached has gathered nothing."""
        return {name: self._of(e) for e, names in self._names.items() for name in names}


Tap: TypeAlias = LinearTap[G] | ExpertTap[G]


def taps_of(layer: Layer, wanted: Collection[str], make: Callable[[int], G], tokens: int) -> list[tuple[Place, Tap[G]]]:
    """A tap for each place of the layer that reads for tensors of these names."""
    places = ((place, place.linear) for place in (*layer.places, *layer.reads))
    read = [(p, LinearTap(v, wanted, make)) for p, v in places if any(w.name in wanted for w in v.weights)]
    chosen = ((place, ExpertTap(place.linear, wanted, make, tokens)) for place in layer.stacks)
    return [*read, *((place, tap) for place, tap in chosen if tap.wanted)]


@contextmanager
def tapped(taps: Sequence[tuple[Place, Tap[G]]]) -> Iterator[None]:
    """Within the block the taps stand in their places."""
    for place, tap in taps:
        place.put(tap)
    try:
        yield
    finally:
        for place, tap in taps:
            place.put(tap.linear)
