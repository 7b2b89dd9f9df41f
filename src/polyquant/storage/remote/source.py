"""A remote file as a `Source`, and as a binary file object."""

from __future__ import annotations

import io
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyquant.errors import InputError, UnsupportedError
from polyquant.storage.file_state import FileState
from polyquant.storage.locations import RemotePath, located
from polyquant.storage.remote.ranges import known
from polyquant.storage.source import Source, record_opened
from polyquant.types import U8

__all__ = ["RemoteFile", "RemoteSource", "unopened"]


class RemoteSource(Source):
    """The file of a URL; every read fetches a range. Not mapped: `view` reads into memory."""

    __slots__ = ("ranges",)

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open the file. Raises RemoteError, InputError if there is none or it is a Git LFS pointer."""
        where = located(path)
        assert isinstance(where, RemotePath), where
        self.path, self._map = where, None
        self.ranges = known(where)
        self.size = self.ranges.entry.size
        self._refuse_pointer()
        record_opened(where, self.state())

    def fileno(self) -> int:
        """Raise UnsupportedError."""
        raise UnsupportedError("a URL has no file descriptor", file=self.path, hint="download the file")

    def state(self) -> FileState:
        """Return the identity of the file."""
        return self.ranges.entry.state

    def map(self) -> U8:
        """Raise UnsupportedError."""
        raise UnsupportedError("a URL cannot be mapped", file=self.path, hint="download the file")

    def start(self, n: int) -> U8:
        """Return at least the first n bytes; they are kept for the next reader."""
        return np.frombuffer(self.ranges.start(n), np.uint8)

    def view(self, offset: int, n: int) -> U8:
        """Read n bytes into memory."""
        out = np.empty(n, np.uint8)
        self.read_into(offset, out)
        return out

    def read_into(self, offset: int, out: NDArray[Any]) -> None:
        """Fill a C-contiguous array from `offset`. Raises RemoteError; InputError if the file is too short."""
        view = out.reshape(-1).view(np.uint8).data
        if offset < 0 or offset + len(view) > self.size:
            raise InputError(
                "is too short for its data", file=self.path, expected=f"{len(view)} bytes at {offset}", found=self.size
            )
        self.ranges.read_into(offset, view)

    def pread(self, offset: int, n: int) -> U8:
        """Read n bytes of a header or a small file; they are kept for the next reader."""
        if offset < 0 or n < 0 or offset + n > self.size:
            raise InputError("is too short", file=self.path, expected=f"{offset + n} bytes", found=self.size)
        return np.array(np.frombuffer(self.ranges.read(offset, n), np.uint8)) if n else np.empty(0, np.uint8)

    def close(self) -> None:
        """Return at once: connections are shared."""


def unopened() -> RemoteSource:
    """Return a RemoteSource before its `__init__`, for `Source(path)`."""
    return object.__new__(RemoteSource)


class RemoteFile(io.RawIOBase):
    """A remote file, opened for reading bytes."""

    def __init__(self, path: RemotePath) -> None:
        self._source, self._at = RemoteSource(path), 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to a position."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._source.size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        """Return the position."""
        return self._at

    def readinto(self, out: Any) -> int:
        """Read up to the size of `out`."""
        view = memoryview(out).cast("B")
        n = max(0, min(len(view), self._source.size - self._at))
        if n:
            self._source.read_into(self._at, np.frombuffer(view[:n], np.uint8))
        self._at += n
        return n
