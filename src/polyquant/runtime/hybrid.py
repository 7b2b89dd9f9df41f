"""Parts of hybrids: chosen per layer, or in parallel (architectures/hybrid.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polyquant.architectures import hybrid
from polyquant.ops.decoder import add
from polyquant.runtime.kv_cache import LayerCache
from polyquant.runtime.layer import combined_state, computes, is_separable
from polyquant.runtime.rotary import Rotation
from polyquant.runtime.site import Site
from polyquant.types import F32

__all__ = ["ParallelParts", "part_of"]


def part_of(part: hybrid.ByLayer, site: Site) -> Any | None:
    """Return the part of layer `site.index`, None if it has none."""
    chosen = part.at(site.hyper, site.index)
    return None if chosen is None else computes(chosen)(chosen, site)


class ParallelParts:
    """first(x) + second(x)."""

    linears: tuple[str, ...] = ()

    def __init__(self, part: hybrid.ParallelParts, site: Site) -> None:
        self.nested = tuple(computes(p)(p, site) for p in (part.first, part.second))
        self.state_spec = combined_state(*self.nested)
        self.recordable = all(getattr(p, "recordable", True) for p in self.nested)
        self.separable = all(is_separable(p) for p in self.nested)

    def __call__(self, x: F32, rotations: Sequence[Rotation], cache: LayerCache) -> F32:
        """x [T, hidden] -> [T, hidden]."""
        first, second = (part(x, rotations, cache) for part in self.nested)
        return add(first, second)
