"""The journal of a run: the content of its work folder, the complete tensors, and pending moves to the target.

One line per entry: a checksum, then JSON. The first line names the job and its files. A kill may tear the last line:
everything from the first failing checksum on is ignored. A complete tensor has a checksum for each block written, so
that damaged or lost bytes are detected before they are used.

    {"job": FINGERPRINT, "target": NAME, "files": [NAME, ...]}
    {"tensor": NAME, "report": ..., "blocks": [[PART, OFFSET, BYTES, CRC32], ...]}
    {"moves": [[FILE, TARGET, INODE], ...], "old": {TARGET: [NAME, ...]}}
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["NAME", "Block", "Done", "Journal", "Move", "Publication", "append", "read"]

NAME = "journal"
"""File name of the journal in the work folder."""

_READ_AT_ONCE = 1 << 20


@dataclass(frozen=True, slots=True)
class Block:
    """Bytes written: `nbytes` at `offset` of a part's slot, and their CRC-32."""

    part: str
    offset: int
    nbytes: int
    crc: int


@dataclass(frozen=True, slots=True)
class Done:
    """A complete tensor: the report of its step, and its blocks."""

    report: Any
    blocks: tuple[Block, ...]


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
    """The valid content of a journal. nbytes: its length; bytes after it are a torn line."""

    job: str
    files: tuple[str, ...]
    done: Mapping[str, Done] = field(default_factory=dict)
    publication: Publication | None = None
    nbytes: int = 0


def append(journal: int, **values: Any) -> None:
    """Append one line to the journal with this descriptor."""
    text = json.dumps(values).encode()
    view = memoryview(b"%08x %s\n" % (zlib.crc32(text), text))
    while view:
        view = view[os.write(journal, view) :]


def read(journal: int) -> Journal | None:
    """Read the journal with this descriptor; None if its first line is incomplete."""
    raw = b""
    while piece := os.pread(journal, _READ_AT_ONCE, len(raw)):
        raw += piece
    entries: list[dict[str, Any]] = []
    good = 0
    for line in raw.splitlines(keepends=True):
        text = line[9:-1]
        if line != b"%08x %s\n" % (zlib.crc32(text), text):
            break
        entries.append(json.loads(text))
        good += len(line)
    if not entries or not {"job", "files"} <= entries[0].keys():
        return None
    done = {e["tensor"]: Done(e["report"], tuple(Block(*b) for b in e["blocks"])) for e in entries if "tensor" in e}
    moves = [_publication(e) for e in entries if "moves" in e]
    return Journal(entries[0]["job"], tuple(entries[0]["files"]), done, moves[-1] if moves else None, good)


def _publication(entry: Mapping[str, Any]) -> Publication:
    old: Mapping[str, Sequence[str]] = entry["old"]
    return Publication(tuple(Move(*m) for m in entry["moves"]), {name: tuple(names) for name, names in old.items()})
