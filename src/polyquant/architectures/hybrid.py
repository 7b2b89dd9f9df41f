"""Layers whose parts differ by index, and parallel parts: see parts.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from polyquant.architectures.hyper import Hyper
from polyquant.architectures.parts import Feed, Part, parameters
from polyquant.types import Shape

__all__ = ["ByLayer", "NoPart", "ParallelParts", "attention_or"]


@dataclass(frozen=True, slots=True)
class ByLayer:
    """One of several parts, chosen per layer. which: (hyper-parameters, layer) -> its index, None for a layer without
    any."""

    parts: tuple[Part, ...]
    which: Callable[[Hyper, int], int | None]
    runtime: ClassVar[str] = "polyquant.runtime.hybrid:part_of"

    @property
    def feeds(self) -> tuple[Feed, ...]:
        """See Part: of all kinds of layers."""
        return tuple(feed for part in self.parts for feed in part.feeds)

    def at(self, hyper: Hyper, index: int) -> Part | None:
        """Return the part of layer `index`."""
        choice = self.which(hyper, index)
        return None if choice is None else self.parts[choice]

    def shapes(self, hyper: Hyper, index: int) -> dict[str, Shape]:
        """See Part."""
        part = self.at(hyper, index)
        return {} if part is None else dict(part.shapes(hyper, index))

    def parameters(self, hyper: Hyper, index: int) -> dict[str, Shape]:
        """See Part."""
        part = self.at(hyper, index)
        return {} if part is None else parameters(part, hyper, index)


@dataclass(frozen=True, slots=True)
class ParallelParts:
    """Two parallel parts that read the same norm: first(x) + second(x)."""

    first: Part
    second: Part
    runtime: ClassVar[str] = "polyquant.runtime.hybrid:ParallelParts"

    @property
    def feeds(self) -> tuple[Feed, ...]:
        """See Part. The layer merges the feeds that share a norm."""
        return (*self.first.feeds, *self.second.feeds)

    def shapes(self, hyper: Hyper, index: int) -> dict[str, Shape]:
        """See Part."""
        return {**self.first.shapes(hyper, index), **self.second.shapes(hyper, index)}

    def parameters(self, hyper: Hyper, index: int) -> dict[str, Shape]:
        """See Part."""
        return {**parameters(self.first, hyper, index), **parameters(self.second, hyper, index)}


def attention_or(attention: Part, other: Part) -> ByLayer:
    """Return attention in the layers where Hyper.attends is true, `other` in the rest."""
    return ByLayer((attention, other), _first_where_attended)


def _first_where_attended(hyper: Hyper, index: int) -> int:
    return 0 if hyper.attends(index) else 1


def _none(hyper: Hyper, index: int) -> None:
    return None


def NoPart() -> ByLayer:  # noqa: N802 - named like the part classes
    """An absent part: the architecture has nothing in this place."""
    return ByLayer((), _none)
