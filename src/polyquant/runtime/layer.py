"""A decoder layer, composed of the parts that the architecture's record names."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from polyquant.architectures.parts import Layer as Record
from polyquant.architectures.parts import Part
from polyquant.ops.decoder import add
from polyquant.runtime.kv_cache import KVCache
from polyquant.runtime.rotary import Rotary
from polyquant.runtime.site import Place, Site
from polyquant.types import F32

__all__ = ["SequentialLayer", "computes"]


class SequentialLayer:
    """h = x + attention(x);  y = h + feed_forward(h)."""

    recordable = True

    def __init__(self, layer: Record, site: Site) -> None:
        self.attention = computes(layer.attention)(layer.attention, site)
        self.feed_forward = computes(layer.feed_forward)(layer.feed_forward, site)

    def __call__(self, x: F32, cos: F32, sin: F32, rotary: Rotary, cache: KVCache) -> F32:
        """See decoder.Layer."""
        x = add(x, self.attention(x, cos, sin, rotary, cache))
        return add(x, self.feed_forward(x))

    @property
    def places(self) -> tuple[Place, ...]:
        """See decoder.Layer."""
        return tuple(Place(part, key) for part in (self.attention, self.feed_forward) for key in part.linears)


def computes(part: Part | Record) -> Any:
    """The class that computes a part."""
    module, _, attribute = part.runtime.partition(":")
    return getattr(import_module(module), attribute)
