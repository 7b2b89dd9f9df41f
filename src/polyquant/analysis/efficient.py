"""The efficient ones among models: those that no other one beats in both size and error."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["efficient_names"]


def efficient_names(points: Mapping[str, tuple[int, float]]) -> frozenset[str]:
    """Return the names for which no other point is at most as large in both values; equal points are both efficient.

    points: name -> (bytes, error).
    """
    return frozenset(
        name
        for name, mine in points.items()
        if not any(o[0] <= mine[0] and o[1] <= mine[1] and o != mine for o in points.values())
    )
