"""The bytes of the source that a conversion reads, in order, so that those of a URL are fetched ahead.

A streaming step reads the rows of each block, from all parts of its weight; a small part is announced at once. Any
other step reads its sources whole, one after the other. The announcement is a hint: a read that differs from it is only
slower.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

from polyquant.formats.steps import Step
from polyquant.operations import Same
from polyquant.storage.locations import is_remote
from polyquant.storage.source import FileArray, Source, fetching
from polyquant.types import Checkpoint, StoredArray

__all__ = ["reading_ahead", "window_bytes"]

_WINDOW = 64 << 20
_LEAST = 8 << 20
_SMALL = 1 << 20
"""Bytes of a part that is announced at once, such as the scales of a matrix."""


def window_bytes(source: Checkpoint, max_memory: int | None = None) -> int:
    """Bytes of memory for data that is fetched ahead: 0 for a local source, a sixth of `max_memory` at most."""
    if source.in_memory or not is_remote(source.path):
        return 0
    return _WINDOW if max_memory is None else max(_LEAST, min(_WINDOW, max_memory // 6))


def reading_ahead(
    source: Checkpoint, work: Iterable[tuple[Step, Sequence[slice | None]]], limit: int | None
) -> AbstractContextManager[None]:
    """Fetch the bytes of these steps and row blocks ahead within the block, if the source is remote.

    limit: bytes that the jobs may use; the window is smaller.
    """
    window = window_bytes(source, limit)
    if window == 0:
        return nullcontext()
    return fetching((span for step, blocks in work for span in _spans(source, step, blocks)), window)


def _spans(source: Checkpoint, step: Step, blocks: Sequence[slice | None]) -> Iterator[tuple[Source, int, int]]:
    arrays = [array for name in step.map.sources for array in source[name].arrays.values()]
    if not isinstance(step.map.op, Same) or None in blocks:
        for array in arrays:
            yield from _rows(array, None)
        return
    small = [array for array in arrays if array.spec.nbytes <= _SMALL]
    for array in small:
        yield from _rows(array, None)
    for block in blocks:
        for array in arrays:
            if array not in small:
                yield from _rows(array, block)


def _rows(array: StoredArray, rows: slice | None) -> Iterator[tuple[Source, int, int]]:
    """The bytes of rows [a, b) of the first axis, or of the whole array."""
    if not isinstance(array, FileArray):
        return
    length = array.spec.shape[0] if array.spec.shape else 1
    start, stop, _ = (rows or slice(None)).indices(length)
    row = array.spec.nbytes // max(1, length)
    if start < stop:
        yield array.source, array.offset + start * row, (stop - start) * row
