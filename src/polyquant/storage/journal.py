"""The journal of a run: which tensors are complete, so that the same job can be taken up after a kill.

One line an entry, a checksum and JSON; the first names the job. A kill may tear the last line: from the first line whose checksum fails
nothing is believed. What was written before the machine restarted may never have reached the disk, so a restart makes it another job.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["NAME", "entry", "open_journal", "read_journal"]

NAME = ".journal"
"""Its name in the staging folder."""


def entry(values: Mapping[str, Any]) -> bytes:
    """One line."""
    text = json.dumps(values).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _job(fingerprint: str) -> dict[str, Any]:
    boot = Path("/proc/sys/kernel/random/boot_id")
    return {"job": fingerprint, "boot": boot.read_text().strip() if boot.is_file() else ""}


def read_journal(folder: Path, fingerprint: str) -> tuple[dict[str, Any], int] | None:
    """What an earlier run of the same job finished (tensor -> report), and the bytes of journal that say so; None if there was none."""
    path = folder / NAME
    if not path.is_file():
        return None
    entries, good = [], 0
    for line in path.read_bytes().splitlines(keepends=True):
        text = line[9:-1]
        if line != b"%08x %s\n" % (zlib.crc32(text), text):
            break
        entries.append(json.loads(text))
        good += len(line)
    if not entries or entries[0] != _job(fingerprint):
        return None
    return {e["tensor"]: e["report"] for e in entries[1:]}, good


def open_journal(folder: Path, fingerprint: str, good: int | None) -> int:
    """The journal as a descriptor to append to: its first `good` bytes kept, or (None) begun anew."""
    journal = os.open(folder / NAME, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    os.ftruncate(journal, good or 0)
    if good is None:
        os.write(journal, entry(_job(fingerprint)))
    return journal
