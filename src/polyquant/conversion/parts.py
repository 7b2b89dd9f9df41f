"""A conversion in parts: what identifies the job on every machine, and how its parts become one output."""

from __future__ import annotations

import os

from polyquant import __version__
from polyquant.conversion.steps import Plan
from polyquant.ops.checksum import crc32
from polyquant.storage.parts import Job, Sources
from polyquant.storage.spans import gaps, spans_by_file
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
    spans, crc = spans_by_file(layout), 0
    for file in layout.files:
        pieces = [(start, start + len(data), data) for start, data in file.pieces]
        covered = [*((start, stop) for start, stop, _ in pieces), *spans[file.name]]
        padding = [(start, stop, bytes(stop - start)) for start, stop in gaps(covered, file.size)]
        for _, _, data in sorted([*pieces, *padding], key=_place):
            crc = crc32(data, crc)
    return crc


def _place(piece: tuple[int, int, bytes]) -> tuple[int, int]:
    return piece[:2]


def source_states(plan: Plan) -> Sources:
    """Size and mtime of each file of the source, by its name relative to the source."""
    root = plan.source.path.absolute()
    base = root if root.is_dir() else root.parent
    return {os.path.relpath(path, base): (state.size, state.mtime_ns) for path, state in plan.source_files.items()}
