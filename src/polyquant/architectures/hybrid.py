"""Layers whose parts differ from one to the next, and two parts beside each other: see parts.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from polyquant.architectures.hyper import Hyper
from polyquant.architectures.parts import Feed, Part, parameters
from polyquant.types import Shape

__all__ = ["Beside", "ByLayer", "NoPart", "attention_or"]


@dataclass(frozen=True, slots=True)
class ByLayer:
    """One of several parts in each layer. which: (hyper-parameters, layer) -> its index, None for a layer that has none of them."""

    parts: tuple[Part, ...]
    which: Callable[[Hyper, int], int | None]
    runtime: ClassVar[str] = "polyquant.runtime.hybrid:part_of"

    @property
    def feeds(self) -> tuple[Feed, ...]:
        """See Part: of all kinds of layers."""
        return tuple(feed for part in self.parts for feed in part.feeds)

    def at(self, hyper: Hyper, index: int) -> Part | None:
        """The part of layer `index`."""
        found = self.which(hyper, index)
        return None if found is None else self.parts[found]

    def shapes(self, hyper: Hyper, index: int) -> dict[str, Shape]:
        """See Part."""
        part = self.at(hyper, index)
        return {} if part is None else dict(part.shapes(hyper, index))

    def parameters(self, hyper: Hyper, index: int) -> dict[str, Shape]:
        """See Part."""
        part = self.at(hyper, index)
        return {} if part is None else parameters(part, hyper, index)


@dataclass(frozen=True, slots=True)
class Beside:
    """Two parts that read the same norm: first(x) + second(x)."""

    first: Part
    second: Part
    runtime: ClassVar[str] = "polyquant.runtime.hybrid:Beside"

    @property
    def feeds(self) -> tuple[Feed, ...]:
        """See Part: the layer joins what both read."""
        return (*self.first.feeds, *self.second.feeds)

    def shapes(self, hyper: Hyper, index: int) -> dict[str, Shape]:
        """See Part."""
        return {**self.first.shapes(hyper, index), **self.second.shapes(hyper, index)}

    def parameters(self, hyper: Hyper, index: int) -> dict[str, Shape]:
        """See Part."""
        return {**parameters(self.first, hyper, index), **parameters(self.second, hyper, index)}


def attention_or(attention: Part, other: Part) -> ByLayer:
    """Attention in the layers that Hyper says attend, `other` in the rest."""
    return ByLayer((attention, other), _first_where_attended)


def _first_where_attended(hyper: Hyper, index: int) -> int:
    return 0 if hyper.attends(index) else 1


def _none(hyper: Hyper, index: int) -> None:
    return None


def NoPart() -> ByLayer:  # noqa: N802 - reads as the name of a part, like those beside it
    """Nothing: the place of a part that the architecture does not have."""
    return ByLayer((), _none)
