"""The way back of a translation: of the maps that make targets of sources, those that make the sources of the targets.

A source that several targets took parts of (a fused projection that was split, a stack whose experts were taken apart) is joined again: the operations
on it may begin alike, then each takes its part, and each may do more with it.

    chain(Reshape, Slice(0, 8, axis=1), Transpose)   ->   Joined((Transpose, Same), Concat(1)), and Reshape back
    chain(Reshape, Slice(8, 24, axis=1))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from polyquant.errors import UnsupportedError
from polyquant.operations import Chain, Concat, Interleave, Joined, Matrix, Operation, Same, Slice, Stack, chain
from polyquant.types import Shape, TensorMap

__all__ = ["inverted"]


def inverted(maps: Sequence[TensorMap], shapes: Mapping[str, Shape]) -> tuple[TensorMap, ...]:
    """One map for each source, in the order in which the maps name them. shapes: of the sources.

    Raises UnsupportedError for a source that the targets do not hold whole.
    """
    readers: dict[str, list[TensorMap]] = {}
    for made in maps:
        for name in made.sources:
            readers.setdefault(name, []).append(made)
    return tuple(_back(name, found, shapes) for name, found in readers.items())


def _back(name: str, maps: Sequence[TensorMap], shapes: Mapping[str, Shape]) -> TensorMap:
    """The map that makes one source: of the first target that holds it whole, else of all that hold a part."""
    keep_float = all(made.keep_float for made in maps)
    for made in maps:
        try:
            ways = made.op.inverse([shapes[n] for n in made.sources])
        except UnsupportedError:
            continue
        op = ways[made.sources.index(name)]
        return TensorMap(name, (made.target,), shapes[name], op, keep_float=keep_float)
    single = [made for made in maps if len(made.sources) == 1]
    parts = sorted((_part(made, shapes[name]) for made in single), key=lambda p: p.first)
    by = _join(parts, name)
    each = tuple(p.back for p in parts)
    joined = by if all(isinstance(op, Same) for op in each) else Joined(each, by)
    sources = tuple(p.map.target for p in parts)
    return TensorMap(name, sources, shapes[name], chain(joined, parts[0].before), keep_float=keep_float)


@dataclass(frozen=True, slots=True)
class _Part:
    """A target that took a part: `before` undoes what came first, `back` what came after. size: the axis that was cut."""

    map: TensorMap
    prefix: bytes
    before: Operation
    cut: Slice | Matrix
    back: Operation
    size: int

    @property
    def first(self) -> int:
        """Where the part begins."""
        return self.cut.index if isinstance(self.cut, Matrix) else self.cut.start


def _part(made: TensorMap, shape: Shape) -> _Part:
    """The one step that takes a part, and the inverses of those around it. Raises UnsupportedError if there is none, or a second."""
    steps = made.op.steps if isinstance(made.op, Chain) else (made.op,)
    at = next((i for i, step in enumerate(steps) if isinstance(step, Slice | Matrix)), None)
    if at is None:
        raise UnsupportedError("is not whole in its target", tensor=made.origin, found=made.target)
    cut = steps[at]
    assert isinstance(cut, Slice | Matrix)
    prefix, tail = chain(*steps[:at]), chain(*steps[at + 1 :])
    whole = prefix.shape([shape])
    size = whole[0 if isinstance(cut, Matrix) else cut.axis]
    (before,) = prefix.inverse([shape])
    (back,) = tail.inverse([cut.shape([whole])])
    return _Part(made, prefix.identity, before, cut, back, size)


def _join(parts: Sequence[_Part], name: str) -> Operation:
    """What puts the parts together again, in their order. Raises UnsupportedError for parts that leave something out, or overlap."""
    cuts = [p.cut for p in parts]
    sizes, size = {p.size for p in parts}, parts[0].size if parts else 0
    alike = len({p.prefix for p in parts}) == 1 and len(sizes) == 1
    slices = [c for c in cuts if isinstance(c, Slice)]
    if alike and not slices and [p.first for p in parts] == list(range(size)):
        return Stack()
    if alike and len(slices) == len(cuts) and len({(c.step, c.axis) for c in slices}) == 1:
        step, axis, firsts = slices[0].step, slices[0].axis, [c.start for c in slices]
        if step == 1 and [*firsts, size] == [0, *(c.stop for c in slices)]:
            return Concat(axis)
        ends = [len(range(c.start, c.stop, step)) * step for c in slices]
        if step > 1 and firsts == list(range(step)) and all(end == size for end in ends):
            return Interleave(axis)
    raise UnsupportedError(
        "its targets do not hold it whole", tensor=name, found=", ".join(p.map.target for p in parts) or "no part of it"
    )
