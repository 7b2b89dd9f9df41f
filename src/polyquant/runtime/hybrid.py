"""Parts of hybrids: another one in each layer, or two beside each other (architectures/hybrid.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polyquant.architectures import hybrid
from polyquant.ops.decoder import add
from polyquant.runtime.kv_cache import KVCache
from polyquant.runtime.layer import computes, kept_by
from polyquant.runtime.rotary import Turns
from polyquant.runtime.site import Site
from polyquant.types import F32

__all__ = ["ParallelParts", "part_of"]


def part_of(part: hybrid.ByLayer, site: Site) -> Any | None:
    """What layer `site.index` has, None for nothing."""
    found = part.at(site.hyper, site.index)
    return None if found is None else computes(found)(found, site)


class ParallelParts:
    """first(x) + second(x)."""

    linears: tuple[str, ...] = ()

    def __init__(self, part: hybrid.ParallelParts, site: Site) -> None:
        self.nested = tuple(computes(p)(p, site) for p in (part.first, part.second))
        self.keeps = kept_by(*self.nested)
        self.recordable = all(getattr(p, "recordable", True) for p in self.nested)

    def __call__(self, x: F32, turns: Sequence[Turns], cache: KVCache) -> F32:
        """x [T, hidden] -> [T, hidden]."""
        first, second = (part(x, turns, cache) for part in self.nested)
        return add(first, second)
