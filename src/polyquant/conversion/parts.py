"""A conversion in parts: what identifies the job on every machine, and how its parts become one output."""

from __future__ import annotations

import os
import zlib

from polyquant import __version__
from polyquant.conversion.steps import Plan
from polyquant.storage.parts import Job, Sources
from polyquant.types import Layout

__all__ = ["job_of", "source_states"]


def job_of(plan: Plan, count: int, command: str) -> Job:
    """The job of a plan in `count` parts. command: makes a part, with {part} for "3/8"."""
    return Job(
        name=plan.identity,
        files=tuple(f.name for f in plan.layout.files),
        count=count,
        sizes=tuple(f.size for f in plan.layout.files),
        folder=plan.layout.folder,
        payload=sum(slot.spec.nbytes for slot in plan.layout.slots.values()),
        headers=_headers(plan.layout),
        format=plan.format,
        version=__version__,
        command=command,
    )


def _headers(layout: Layout) -> int:
    """CRC-32 of all bytes outside the slots: headers, and zeros between them."""
    spans: dict[str, list[tuple[int, int]]] = {f.name: [] for f in layout.files}
    for slot in layout.slots.values():
        spans[slot.file].append((slot.offset, slot.offset + slot.spec.nbytes))
    crc = 0
    for file in layout.files:
        pieces = sorted(
            [*file.pieces, *((start, None) for start, stop in spans[file.name] if stop > start)], key=_first
        )
        stops = dict(spans[file.name])
        at = 0
        for start, data in [*pieces, (file.size, b"")]:
            crc = zlib.crc32(bytes(max(0, start - at)), crc)
            crc = crc if data is None else zlib.crc32(data, crc)
            at = max(at, stops[start] if data is None else start + len(data))
    return crc


def _first(piece: tuple[int, bytes | None]) -> int:
    return piece[0]


def source_states(plan: Plan) -> Sources:
    """Size and mtime of each file of the source, by its name relative to the source."""
    root = plan.source.path.absolute()
    base = root if root.is_dir() else root.parent
    return {os.path.relpath(path, base): (state.size, state.mtime_ns) for path, state in plan.source_files.items()}
