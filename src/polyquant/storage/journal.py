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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from sys import intern
from typing import Any

__all__ = [
    "NAME",
    "Block",
    "Done",
    "Journal",
    "Move",
    "Publication",
    "append",
    "finished",
    "lines",
    "parsed",
    "read",
    "valid",
]

NAME = "journal"
"""File name of the journal in the work folder."""

_READ_AT_ONCE, _LONGEST = 1 << 20, 1 << 26
_CHECKSUM = 9
"""Bytes of a line before its JSON."""
_TENSOR = b'{"tensor"'


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


def read(journal: int, *, tensors: bool = True) -> Journal | None:
    """Read the journal with this descriptor; None if its first line is incomplete.

    tensors: False leaves `done` empty, which takes hundreds of megabytes less for a model of many tensors.
    """
    first: Mapping[str, Any] = {}
    done: dict[str, Done] = {}
    publication, good = None, 0
    for line in lines(journal):
        if first and not tensors and line.startswith(_TENSOR, _CHECKSUM) and valid(line):
            good += len(line)
            continue
        entry = parsed(line)
        if entry is None:
            break
        first = first or entry
        good += len(line)
        if "tensor" in entry:
            done[entry["tensor"]] = finished(entry)
        elif "moves" in entry:
            publication = _publication(entry)
    if not {"job", "files"} <= first.keys():
        return None
    return Journal(first["job"], tuple(first["files"]), done, publication, good, first.get("parts"))


def lines(journal: int) -> Iterator[bytes]:
    """The lines of the journal with this descriptor, with their line ends; the last may be torn."""
    at, rest = 0, b""
    while piece := os.pread(journal, _READ_AT_ONCE, at):
        at += len(piece)
        *whole, rest = (rest + piece).splitlines(keepends=True)
        yield from whole
        if rest.endswith(b"\n"):
            yield rest
            rest = b""
        if len(rest) > _LONGEST:
            break  # not a journal
    if rest:
        yield rest


def valid(line: bytes) -> bool:
    """True if the checksum of a line is right."""
    text = line[_CHECKSUM:-1]
    return line == b"%08x %s\n" % (zlib.crc32(text), text)


def parsed(line: bytes) -> dict[str, Any] | None:
    """The entry of a line; None if its checksum fails."""
    if not valid(line):
        return None
    entry: dict[str, Any] = json.loads(line[_CHECKSUM:-1], object_pairs_hook=_shared_keys)
    return entry


def _shared_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A dict whose keys, the same in every line, exist once."""
    return {intern(key): value for key, value in pairs}


def finished(entry: Mapping[str, Any]) -> Done:
    """The tensor that an entry lists as complete."""
    blocks = tuple(Block(*b) for b in entry["blocks"])
    return Done(entry["report"], blocks, tuple(entry["rows"]) if "rows" in entry else None, entry.get("task", 0))


def _publication(entry: Mapping[str, Any]) -> Publication:
    old: Mapping[str, Sequence[str]] = entry["old"]
    return Publication(tuple(Move(*m) for m in entry["moves"]), {name: tuple(names) for name, names in old.items()})
