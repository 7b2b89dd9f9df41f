"""A decoder layer, composed of the parts that the architecture's record names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

from polyquant.architectures.parts import FeedForward, Part
from polyquant.architectures.parts import Layer as Record
from polyquant.architectures.parts import ParallelLayer as ParallelRecord
from polyquant.ops.decoder import add
from polyquant.runtime.attention import Keys
from polyquant.runtime.rotary import Rotation
from polyquant.runtime.site import Place, Site
from polyquant.runtime.state import StateSpec
from polyquant.types import F32

__all__ = ["ParallelLayer", "SequentialLayer", "combined_state", "computes", "is_separable"]


class SequentialLayer:
    """h = x + s attention(x);  y = h + s feed_forward(h), s = residual_scale or 1. Either part may be None."""

    recordable: bool = True
    separable: bool = True

    def __init__(self, layer: Record, site: Site) -> None:
        self.attention = computes(layer.attention)(layer.attention, site)
        self.feed_forward = computes(layer.feed_forward)(layer.feed_forward, site)
        self.scale = site.hyper.real("residual_scale", 1.0)
        self.recordable = type(self).recordable and all(
            getattr(part, "recordable", True) for part in (self.attention, self.feed_forward)
        )
        self.separable = all(is_separable(part) for part in (self.attention, self.feed_forward))
        self.stepwise = self.separable and all(
            getattr(part, "stepwise", True) for part in (self.attention, self.feed_forward)
        )

    def __call__(self, x: F32, rotations: Sequence[Rotation], cache: Keys) -> F32:
        """See decoder.Layer."""
        if self.attention is not None:
            x = add(x, self.attention(x, rotations, cache), self.scale)
        return x if self.feed_forward is None else add(x, self.feed_forward(x), self.scale)

    @property
    def state_spec(self) -> StateSpec:
        """See decoder.Layer."""
        return combined_state(self.attention, self.feed_forward)

    @property
    def places(self) -> tuple[Place, ...]:
        """See decoder.Layer."""
        return tuple(Place(part, key) for part in self._parts for key in part.linears)

    @property
    def stacks(self) -> tuple[Place, ...]:
        """See decoder.Layer."""
        return tuple(Place(part, key) for part in self._parts for key in getattr(part, "stacks", ()))

    @property
    def reads(self) -> tuple[Place, ...]:
        """See decoder.Layer."""
        return tuple(Place(part, key) for part in self._parts for key in getattr(part, "reads", ()))

    @property
    def _parts(self) -> tuple[Any, ...]:
        """The parts, including nested ones."""
        own = (part for part in (self.attention, self.feed_forward) if part is not None)
        return tuple(one for part in own for one in (part, *getattr(part, "nested", ())))


class ParallelLayer(SequentialLayer):
    """y = x + s attention(x) + s feed_forward(x)."""

    def __init__(self, layer: ParallelRecord, site: Site) -> None:
        self.parallel = not layer.flag or bool(site.hyper.count(layer.flag))
        self.shared = layer.shared and self.parallel
        if self.shared and isinstance(layer.feed_forward, FeedForward):
            layer = replace(layer, feed_forward=replace(layer.feed_forward, norm=""))
        super().__init__(layer, site)

    def __call__(self, x: F32, rotations: Sequence[Rotation], cache: Keys) -> F32:
        """See decoder.Layer."""
        if not self.parallel:
            return super().__call__(x, rotations, cache)
        if self.shared:
            n = self.attention.norm(x)
            a, f = self.attention.after_norm(n, rotations, cache), self.feed_forward(n)
        else:
            a, f = self.attention(x, rotations, cache), self.feed_forward(x)
        return add(add(x, a, self.scale), f, self.scale)


def combined_state(*parts: Any) -> StateSpec:
    """Return the combined state of parts; those without `state_spec` have none."""
    out = StateSpec()
    for part in parts:
        out |= getattr(part, "state_spec", StateSpec())
    return out


def is_separable(part: Any) -> bool:
    """Return decoder.Layer.separable of a part; if it does not specify it, True unless it has recurrent states."""
    default = not getattr(part, "state_spec", StateSpec()).states
    return bool(getattr(part, "separable", default))


def computes(part: Part | Record) -> Any:
    """Return the class that computes a part."""
    module, _, attribute = part.runtime.partition(":")
    return getattr(import_module(module), attribute)
