"""What a layer keeps of a text."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Keeps"]


@dataclass(frozen=True, slots=True)
class Keeps:
    """rows: (heads of keys, numbers of each) that every position leaves, once as keys and once as values; None where a layer keeps none of its own."""

    rows: tuple[int, int] | None = None
