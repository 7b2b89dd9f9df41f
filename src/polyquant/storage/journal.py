"""The journal of a run: the content of its work folder, the complete tensors, and pending moves to the target.

One line per entry: a checksum, then JSON. The first line names the job and its files. A kill may tear the last line:
everything from the first failing checksum on is ignored. A complete tensor has a checksum for each block written, so
that damaged or lost bytes are detected before they are used.

    {"job": FINGERPRINT, "target": NAME, "files": [NAME, ...]}
    {"tensor": NAME, "report": ..., "blocks": [[FILE, OFFSET, BYTES, CRC32], ...]}
    {"moves": [[FILE, TARGET, INODE], ...], "old": {TARGET: [NAME, ...]}}

FILE is the index of a file in the first line. The folder of a job in parts has more journals (storage/parts.py): a
tensor's line then also has "rows": [START, STOP, ALL], and its "task", a number that sorts the lines.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "NAME",
    "Block",
    "Done",
    "Journal",
    "Move",
    "Publication",
    "append",
    "content",
    "finished",
    "parsed",
    "read",
]

NAME = "journal"
"""File name of the journal in the work folder."""

_READ_AT_ONCE = 1 << 20


@dataclass(frozen=True, slots=True)
class Block:
    """Bytes written: `nbytes` at `offset` of a file, and their CRC-32. file: index in the job's list of files."""

    file: int
    offset: int
    nbytes: int
    crc: int


@dataclass(frozen=True, slots=True)
class Done:
    """A complete tensor, or rows [start, stop) of `all`: the report of its step, and its blocks."""

    report: Any
    blocks: tuple[Block, ...]
    rows: tuple[int, int, int] | None = None
    task: int = 0


@dataclass(frozen=True, slots=True)
class Move:
    """One rename of a publication: `file` (in the work folder) becomes `target` (next to it).

    inode: of the file or folder.
    """

    file: str
    target: str
    inode: int


@dataclass(frozen=True, slots=True)
class Publication:
    """Pending renames to the target. old: names inside each replaced target that may be removed; [] for a file."""

    moves: tuple[Move, ...]
    old: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Journal:
    """The valid content of a journal. nbytes: its length; bytes after it are a torn line.

    parts: of the folder of a job in parts (storage/parts.py); None in others.
    """

    job: str
    files: tuple[str, ...]
    done: Mapping[str, Done] = field(default_factory=dict)
    publication: Publication | None = None
    nbytes: int = 0
    parts: Mapping[str, Any] | None = None


def append(journal: int, **values: Any) -> None:
    """Append one line to the journal with this descriptor."""
    text = json.dumps(values).encode()
    view = memoryview(b"%08x %s\n" % (zlib.crc32(text), text))
    while view:
        view = view[os.write(journal, view) :]


def read(journal: int) -> Journal | None:
    """Read the journal with this descriptor; None if its first line is incomplete."""
    entries: list[dict[str, Any]] = []
    good = 0
    for line in content(journal).splitlines(keepends=True):
        entry = parsed(line)
        if entry is None:
            break
        entries.append(entry)
        good += len(line)
    if not entries or not {"job", "files"} <= entries[0].keys():
        return None
    first = entries[0]
    moves = [_publication(e) for e in entries if "moves" in e]
    files = tuple(first["files"])
    return Journal(first["job"], files, finished(entries), moves[-1] if moves else None, good, first.get("parts"))


def content(journal: int) -> bytes:
    """All bytes of the journal with this descriptor."""
    pieces: list[bytes] = []
    at = 0
    while piece := os.pread(journal, _READ_AT_ONCE, at):
        pieces.append(piece)
        at += len(piece)
    return b"".join(pieces)


def parsed(line: bytes) -> dict[str, Any] | None:
    """The entry of a line; None if its checksum fails."""
    text = line[9:-1]
    if line != b"%08x %s\n" % (zlib.crc32(text), text):
        return None
    entry: dict[str, Any] = json.loads(text)
    return entry


def finished(entries: Iterable[Mapping[str, Any]]) -> dict[str, Done]:
    """The tensors that these entries list as complete."""
    return {
        e["tensor"]: Done(
            e["report"], tuple(Block(*b) for b in e["blocks"]), tuple(e["rows"]) if "rows" in e else None,
            e.get("task", 0),
        )
        for e in entries
        if "tensor" in e
    }  # fmt: skip


def _publication(entry: Mapping[str, Any]) -> Publication:
    old: Mapping[str, Sequence[str]] = entry["old"]
    return Publication(tuple(Move(*m) for m in entry["moves"]), {name: tuple(names) for name, names in old.items()})
