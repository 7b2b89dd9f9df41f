"""Byte ranges [start, stop) of the files of a layout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from polyquant.types import Layout, Slot

__all__ = ["Span", "gaps", "slots_by_tensor", "spans_by_file"]

Span = tuple[int, int]


def gaps(spans: Iterable[Span], size: int) -> Iterator[Span]:
    """Yield the ranges of [0, size) that no span covers, in order."""
    at = 0
    for start, stop in [*sorted(spans), (size, size)]:
        if start > at:
            yield at, start
        at = max(at, stop)


def spans_by_file(layout: Layout) -> dict[str, list[Span]]:
    """The ranges of the tensors in each file."""
    spans: dict[str, list[Span]] = {f.name: [] for f in layout.files}
    for slot in layout.slots.values():
        if slot.spec.nbytes:
            spans[slot.file].append((slot.offset, slot.offset + slot.spec.nbytes))
    return spans


def slots_by_tensor(layout: Layout) -> dict[str, list[Slot]]:
    """The slots of the parts of each tensor."""
    slots: dict[str, list[Slot]] = {}
    for (tensor, _), slot in layout.slots.items():
        slots.setdefault(tensor, []).append(slot)
    return slots
