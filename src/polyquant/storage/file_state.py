"""The identity of a file, local or on a server: it changes when the content does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Entry", "FileState"]


class FileState(NamedTuple):
    """Stat fields that change with the content: a write changes mtime and ctime, a replaced file has another inode."""

    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int


@dataclass(frozen=True, slots=True)
class Entry:
    """A file or folder on a server. tag: changes with the content (an ETag, or a hash of the content)."""

    size: int
    tag: str = ""
    mtime_ns: int = 0
    folder: bool = False

    @property
    def state(self) -> FileState:
        """The fields that detect changes; a hash of the tag takes the place of inode number and ctime."""
        import hashlib  # loads OpenSSL in 12 ms, for URLs only

        number = int.from_bytes(hashlib.sha256(self.tag.encode()).digest()[:7], "little")
        return FileState(number, self.size, self.mtime_ns, number)
