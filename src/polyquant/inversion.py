"""Invert a translation: from the maps that make targets from sources, derive the maps that make sources from targets.

A source of which several targets took parts (a fused projection that was split, a stack whose experts were extracted)
is joined again. The operations of the targets may start with the same steps, then each takes its part, and each may
continue with further steps.

    chain(Reshape, Slice(0, 8, axis=1), Transpose)   ->   Joined((Transpose, Same), Concat(1)), and Reshape back
    chain(Reshape, Slice(8, 24, axis=1))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from polyquant.errors import UnsupportedError
from polyquant.operations import Concat, Interleave, Joined, Matrix, Operation, Same, Slice, Stack, chain, steps_of
from polyquant.types import Shape, TensorMap

__all__ = ["inverted"]


def inverted(maps: Sequence[TensorMap], shapes: Mapping[str, Shape]) -> tuple[TensorMap, ...]:
    """One map per source, in order of first use. shapes: of the sources.

    Raises UnsupportedError for a source that the targets do not contain completely.
    """
    readers: dict[str, list[TensorMap]] = {}
    for tensor_map in maps:
        for name in tensor_map.sources:
            readers.setdefault(name, []).append(tensor_map)
    return tuple(_back(name, tensors, shapes) for name, tensors in readers.items())


def _back(name: str, maps: Sequence[TensorMap], shapes: Mapping[str, Shape]) -> TensorMap:
    """The map that makes one source: from a target that contains it completely, else from all targets with a part of
    it.
    """
    keep_float = all(tensor_map.keep_float for tensor_map in maps)
    for tensor_map in maps:
        try:
            ways = tensor_map.op.inverse([shapes[n] for n in tensor_map.sources])
        except UnsupportedError:
            continue
        op = ways[tensor_map.sources.index(name)]
        return TensorMap(name, (tensor_map.target,), shapes[name], op, keep_float=keep_float)
    single = [tensor_map for tensor_map in maps if len(tensor_map.sources) == 1]
    parts = sorted((_part(tensor_map, shapes[name]) for tensor_map in single), key=lambda p: p.first)
    by = _join(parts, name)
    each = tuple(p.back for p in parts)
    joined = by if all(isinstance(op, Same) for op in each) else Joined(each, by)
    sources = tuple(p.map.target for p in parts)
    return TensorMap(name, sources, shapes[name], chain(joined, parts[0].before), keep_float=keep_float)


@dataclass(frozen=True, slots=True)
class _Part:
    """A target that took a part. before: inverse of the steps before the cut; back: inverse of those after; size: of
    the cut axis.
    """

    map: TensorMap
    prefix: bytes
    before: Operation
    cut: Slice | Matrix
    back: Operation
    size: int

    @property
    def first(self) -> int:
        """Start of the part."""
        return self.cut.index if isinstance(self.cut, Matrix) else self.cut.start


def _part(tensor_map: TensorMap, shape: Shape) -> _Part:
    """Find the step that takes a part, and invert the steps around it. Raises UnsupportedError unless there is exactly
    one.
    """
    steps = steps_of(tensor_map.op)
    at = next((i for i, step in enumerate(steps) if isinstance(step, Slice | Matrix)), None)
    if at is None:
        raise UnsupportedError(
            "is not completely contained in its target", tensor=tensor_map.origin, found=tensor_map.target
        )
    cut = steps[at]
    assert isinstance(cut, Slice | Matrix)
    prefix, tail = chain(*steps[:at]), chain(*steps[at + 1 :])
    full = prefix.shape([shape])
    size = full[0 if isinstance(cut, Matrix) else cut.axis]
    (before,) = prefix.inverse([shape])
    (back,) = tail.inverse([cut.shape([full])])
    return _Part(tensor_map, prefix.identity, before, cut, back, size)


def _join(parts: Sequence[_Part], name: str) -> Operation:
    """The operation that joins the parts in order. Raises UnsupportedError for parts with gaps or overlaps."""
    cuts = [p.cut for p in parts]
    sizes, size = {p.size for p in parts}, parts[0].size if parts else 0
    same_steps = len({p.prefix for p in parts}) == 1 and len(sizes) == 1
    slices = [c for c in cuts if isinstance(c, Slice)]
    if same_steps and not slices and [p.first for p in parts] == list(range(size)):
        return Stack()
    if same_steps and len(slices) == len(cuts) and len({(c.step, c.axis) for c in slices}) == 1:
        step, axis, firsts = slices[0].step, slices[0].axis, [c.start for c in slices]
        if step == 1 and [*firsts, size] == [0, *(c.stop for c in slices)]:
            return Concat(axis)
        ends = [len(range(c.start, c.stop, step)) * step for c in slices]
        if step > 1 and firsts == list(range(step)) and all(end == size for end in ends):
            return Interleave(axis)
    raise UnsupportedError(
        "its targets do not contain all of it",
        tensor=name,
        found=", ".join(p.map.target for p in parts) or "no part of it",
    )
