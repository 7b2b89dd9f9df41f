"""The journal of a run: what its work folder holds, which tensors are complete, and what is being moved to the target.

One line an entry: a checksum, then JSON. The first names the job and its files. A kill may tear the last line: nothing from the first line
whose checksum fails on is believed. A complete tensor comes with a checksum of each block that was written, so that bytes that were
damaged or lost since are found before they are used.

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
"""Its name in the work folder."""

_READ_AT_ONCE = 1 << 30  # Linux moves at most 2 GiB - 4 KiB a call


@dataclass(frozen=True, slots=True)
class Block:
    """Bytes that were written: `nbytes` at `offset` of a part's slot, and their CRC-32."""

    part: str
    offset: int
    nbytes: int
    crc: int


@dataclass(frozen=True, slots=True)
class Done:
    """A complete tensor: what its step reported, and the blocks that it consists of."""

    report: Any
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Move:
    """One rename of a publication: `file` (relative to the work folder) becomes `target` (beside it); inode: that of the file or folder."""

    file: str
    target: str
    inode: int


@dataclass(frozen=True, slots=True)
class Publication:
    """What was about to appear at the target. old: what each target held that may be removed, as names inside it; [] for a file."""

    moves: tuple[Move, ...]
    old: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Journal:
    """What a journal says, as far as it can be believed. nbytes: length of that part."""

    job: str
    files: tuple[str, ...]
    done: Mapping[str, Done] = field(default_factory=dict)
    publication: Publication | None = None
    nbytes: int = 0


def append(journal: int, **values: Any) -> None:
    """Write one line to the descriptor of a journal."""
    text = json.dumps(values).encode()
    view = memoryview(b"%08x %s\n" % (zlib.crc32(text), text))
    while view:
        view = view[os.write(journal, view) :]


def read(journal: int) -> Journal | None:
    """What the journal with that descriptor says; None if not even its first line is whole."""
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
