"""Files as byte sources: positioned reads, and one lazy memory map per file.

Conversions read (`Source.read_into`): a file that shrinks raises an error. Inspecting a few weights maps
(`Source.view`): nothing is copied, but a file that shrinks under a map kills the process, so long jobs do not use it.
`Source(path)` of a URL is a RemoteSource (storage.remote): every read fetches a range, nothing is mapped.
"""

from __future__ import annotations

import mmap
import os
import stat
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from polyquant.errors import InputError
from polyquant.storage.deferred import Deferred
from polyquant.storage.file_state import FileState
from polyquant.storage.locations import RemotePath, backend_of, located
from polyquant.storage.phases import phase
from polyquant.types import U8, ArraySpec

__all__ = [
    "FileArray",
    "FileState",
    "Source",
    "Swap",
    "fetch_ahead",
    "fetching",
    "file_bytes",
    "opened_files",
    "record_opened",
    "refuse_changed",
    "state_of",
]

_READ_AT_ONCE = 1 << 30  # Linux transfers at most 2 GiB - 4 KiB per call
_LFS = b"version https://git-lfs.github.com/spec/"
_REMOTE_SOURCE = Deferred("polyquant.storage.remote.source:unopened")
_FETCHING = Deferred("polyquant.storage.remote.read_ahead:fetching")
_FETCH_AHEAD = Deferred("polyquant.storage.remote.ranges:fetch_ahead")
_LFS_LIMIT = 1024
"""Pointer files of Git LFS are shorter, in bytes."""


_opened: ContextVar[dict[Path, FileState] | None] = ContextVar("opened files", default=None)


@contextmanager
def opened_files() -> Iterator[dict[Path, FileState]]:
    """Record every file opened for reading within the block, with its state at that time."""
    files: dict[Path, FileState] = {}
    token = _opened.set(files)
    try:
        yield files
    finally:
        _opened.reset(token)


def record_opened(path: Path, state: FileState) -> None:
    """Record a file in the enclosing `opened_files`, if any."""
    if (opened := _opened.get()) is not None:
        opened.setdefault(path.absolute(), state)


def state_of(status: os.stat_result) -> FileState:
    """Return the stat fields that change with the content."""
    return FileState(status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def refuse_changed(files: Mapping[Path, tuple[int, ...]]) -> None:
    """Raise InputError if one of `opened_files` has changed since: the data read may mix old and new content."""
    for path, state in files.items():
        if _state_now(path) != state:
            raise InputError("changed while it was read", file=path, hint="run again when no program is writing to it")


def _state_now(path: Path) -> FileState | None:
    """Return the present state of a file, None if it is gone."""
    if isinstance(path, RemotePath):
        entry = backend_of(path).current(path)
        return None if entry is None else entry.state
    try:
        return state_of(path.stat())
    except OSError:
        return None


def fetch_ahead(paths: Iterable[Path], header: Callable[[Source], object] | None = None) -> None:
    """Announce files that will be opened: remote ones are then opened at the same time.

    header: reads the bytes of a file that its reader needs first. Errors are left to the reader of the file.
    """
    remote = [path for path in paths if isinstance(path, RemotePath)]
    if len(remote) > 1:
        _FETCH_AHEAD(remote, None if header is None else lambda path: header(Source(path)))


def fetching(spans: Iterable[tuple[Source, int, int]], window: int) -> AbstractContextManager[None]:
    """Announce spans (source, offset, bytes) in the order of their reads: remote ones are fetched ahead in the block.

    window: bytes of memory for fetched data.
    """
    announced: AbstractContextManager[None] = _FETCHING(spans, window)
    return announced


def _named(path: str | os.PathLike[str]) -> Path:
    """The file itself: a path of a manifest in a store, which `located` follows, is that file."""
    return path if isinstance(path, Path) else located(path)


class Source:
    """A regular file, or the file of a URL, opened for reading.

    Opening never blocks (FIFOs, devices and folders are refused); links are followed.
    """

    __slots__ = ("__weakref__", "_close", "_fd", "_map", "path", "size")

    def __new__(cls, path: str | os.PathLike[str]) -> Self:
        """Return a RemoteSource for a URL, as Path returns a PosixPath."""
        if cls is Source and isinstance(_named(path), RemotePath):
            return _REMOTE_SOURCE()  # type: ignore[no-any-return] # Python then calls its __init__
        return object.__new__(cls)

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open the file. Raises InputError if it is not a readable regular file, or is a Git LFS pointer."""
        self.path = _named(path)
        self._map: U8 | None = None
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except (OSError, ValueError) as e:  # ValueError: a NUL byte in the name
            why = e.strerror if isinstance(e, OSError) else str(e)
            raise InputError(f"cannot be opened: {why}", file=self.path) from e
        self._close = weakref.finalize(self, os.close, fd)
        self._fd = fd
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            kind = "a folder" if stat.S_ISDIR(status.st_mode) else "a pipe, socket or device"
            raise InputError("is not a regular file", file=self.path, found=kind)
        self.size = status.st_size
        self._refuse_pointer()
        record_opened(self.path, state_of(status))

    def _refuse_pointer(self) -> None:
        if len(_LFS) <= self.size < _LFS_LIMIT and self.pread(0, len(_LFS)).tobytes() == _LFS:
            raise InputError(
                "is a Git LFS pointer, not the file itself",
                file=self.path,
                found=f"{self.size} bytes",
                hint="run `git lfs pull` in that repository, or download the file",
            )

    def fileno(self) -> int:
        """Return the file descriptor, for copies inside the kernel."""
        return self._fd

    def state(self) -> FileState:
        """Return the state of the open file."""
        return state_of(os.fstat(self._fd))

    def start(self, n: int) -> U8:
        """Return at least the first n bytes (all of a shorter file), read-only: of a local file the whole map."""
        return self.map()

    def view(self, offset: int, n: int) -> U8:
        """Return n bytes at `offset`, read-only: a view of the map, where there is one."""
        return self.map()[offset : offset + n]

    def map(self) -> U8:
        """Return the file as a read-only map, uint8 [size]; created once, on first use."""
        if self._map is None:
            if self.size:
                mapped = mmap.mmap(self._fd, self.size, access=mmap.ACCESS_READ)
                self._map = np.frombuffer(mapped, np.uint8)
            else:
                self._map = np.empty(0, np.uint8)
        return self._map

    def read_rows(self, offset: int, pitch: int, out: NDArray[Any]) -> None:
        """Fill the rows of a C-contiguous matrix, each `pitch` bytes after the one before. Raises InputError."""
        flat, width, fd = out.reshape(-1).view(np.uint8), out.nbytes // max(1, len(out)), self._fd
        view: memoryview = flat.data
        with phase("read", len(view)):
            for start in range(0, len(view), width or 1):
                try:
                    done = os.preadv(fd, (view[start : start + width],), offset)
                except OSError as e:
                    raise InputError(f"cannot be read: {e.strerror}", file=self.path) from e
                if done != width:  # interrupted, or the file is too short
                    self._fill(offset, flat[start : start + width].data)
                offset += pitch

    def read_into(self, offset: int, out: NDArray[Any]) -> None:
        """Fill a C-contiguous array from `offset` by positioned reads. Raises InputError if the file is too short."""
        with phase("read", out.nbytes):
            self._fill(offset, out.reshape(-1).view(np.uint8).data)

    def _fill(self, offset: int, view: memoryview) -> None:
        done = 0
        while done < len(view):
            try:
                n = os.preadv(self._fd, [view[done : done + _READ_AT_ONCE]], offset + done)
            except OSError as e:
                raise InputError(f"cannot be read: {e.strerror}", file=self.path) from e
            if n == 0:
                raise InputError(
                    "is too short for its data",
                    file=self.path,
                    expected=f"{len(view)} bytes at {offset}",
                    found=done,
                    hint="the file is truncated or was cut while being read: copy it again",
                )
            done += n

    def pread(self, offset: int, n: int) -> U8:
        """Read n bytes at `offset` into a new array. Raises InputError, before allocating, if the file is too short."""
        if offset < 0 or n < 0 or offset + n > self.size:
            raise InputError("is too short", file=self.path, expected=f"{offset + n} bytes", found=self.size)
        out = np.empty(n, np.uint8)
        self.read_into(offset, out)
        return out

    def close(self) -> None:
        """Close the file; maps in use stay valid. Also happens when the last reference is dropped."""
        self._close()


def file_bytes(path: Path, limit: int | None = None) -> bytes:
    """All bytes of a small file. Raises InputError as `Source`, and for more than `limit` bytes."""
    source = Source(path)
    try:
        if limit is not None and source.size > limit:
            raise InputError("is too large", file=path, expected=f"at most {limit} bytes", found=source.size)
        return source.pread(0, source.size).tobytes()
    finally:
        source.close()


@dataclass(frozen=True, slots=True)
class Swap:
    """Multi-byte fields to byte-swap inside blocks of `block` bytes: (offset, item size, count)."""

    block: int
    fields: tuple[tuple[int, int, int], ...]

    def apply(self, data: U8) -> None:
        """Swap in place; data is uint8, C-contiguous, whole blocks."""
        blocks = data.reshape(-1, self.block)  # [n, block]
        for offset, size, count in self.fields:
            field = blocks[:, offset : offset + size * count].reshape(len(blocks), count, size)
            blocks[:, offset : offset + size * count] = field[:, :, ::-1].reshape(len(blocks), size * count)


@dataclass(frozen=True, slots=True)
class FileArray:
    """One part of one weight in a file: a types.StoredArray.

    swap: set if the file's byte order is not the machine's.
    """

    source: Source
    offset: int
    spec: ArraySpec
    swap: Swap | None = None

    def __post_init__(self) -> None:
        """Raise InputError if the array extends beyond the file."""
        if self.offset < 0 or self.offset + self.spec.nbytes > self.source.size:
            raise InputError(
                "data lies outside the file",
                file=self.source.path,
                expected=f"{self.spec.nbytes} bytes at {self.offset}",
                found=f"a file of {self.source.size} bytes",
                hint="the file is truncated: copy it again",
            )

    def view(self) -> NDArray[Any]:
        """Return the array as a read-only map; from a URL, in memory.

        A copy if bytes must be swapped or the offset is not aligned to the dtype.
        """
        raw = self.source.view(self.offset, self.spec.nbytes)
        if self.swap is None:
            array = np.require(raw.view(self.spec.dtype), requirements="A").reshape(self.spec.shape)
        else:
            raw = raw.copy()
            self._swap_bytes(raw)
            array = raw.view(self.spec.dtype).reshape(self.spec.shape)
        array.flags.writeable = False
        return array

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Read entries [start, stop) of the first axis into a new array. Raises InputError if the file is too short."""
        if not self.spec.shape:
            out = np.empty((), self.spec.dtype)
            self.source.read_into(self.offset, out)
            return out
        length = self.spec.shape[0]
        start, stop, _ = slice(start, stop).indices(length)
        out = np.empty((max(0, stop - start), *self.spec.shape[1:]), self.spec.dtype)
        row = self.spec.nbytes // length if length else 0
        self.source.read_into(self.offset + start * row, out)
        if self.swap is not None:
            self._swap_bytes(out.reshape(-1).view(np.uint8))
        return out

    @property
    def cuts(self) -> bool:
        """True if `rectangle` reads only these bytes: not from a URL, where each piece would be a request."""
        return type(self.source) is Source

    def rectangle(self, places: Sequence[slice]) -> NDArray[Any]:
        """Read entries [start, stop) of both axes of a matrix into a new array, row by row; with swapped bytes, columns
        must be whole blocks.

        Raises InputError if the file is too short.
        """
        (rows, columns), (_, width) = places, self.spec.shape
        out = np.empty((rows.stop - rows.start, columns.stop - columns.start), self.spec.dtype)
        pitch = width * self.spec.dtype.itemsize
        at = self.offset + rows.start * pitch + columns.start * self.spec.dtype.itemsize
        self.source.read_rows(at, pitch, out)
        if self.swap is not None:
            self._swap_bytes(out.reshape(-1).view(np.uint8))
        return out

    def pieces(self, limit: int) -> Iterator[U8]:
        """Yield the bytes in order, in pieces of about `limit` in one buffer. Raises InputError if the file shrank."""
        unit = self.swap.block if self.swap is not None else 1
        buffer = np.empty(min(self.spec.nbytes, max(unit, limit // unit * unit)), np.uint8)
        for at in range(0, self.spec.nbytes, max(1, len(buffer))):
            piece = buffer[: self.spec.nbytes - at]
            self.source.read_into(self.offset + at, piece)
            self._swap_bytes(piece)
            yield piece

    def _swap_bytes(self, raw: U8) -> None:
        if self.swap is not None:
            self.swap.apply(raw)


def foreign(order: str) -> bool:
    """Return True if values of this byte order ("<" or ">") must be swapped on this machine."""
    return (order == ">") == (sys.byteorder == "little")
