"""The parts of remote files that this process has already fetched: headers and small files are read once.

The first request for a file returns its first `FIRST` bytes with its size and identity. Headers that are longer grow by
doubling, so a header of n bytes takes about log2(n / FIRST) requests. Only `pread` and `start` (headers, small files)
are kept; the data of tensors is not.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from polyquant.errors import InputError, PolyquantError, RemoteError
from polyquant.storage import limits
from polyquant.storage.locations import Backend, RemotePath, backend_of

__all__ = ["Ranges", "fetch_ahead", "forget", "known", "stale"]

FIRST = 1 << 18
"""Bytes fetched when a file is opened: most safetensors headers, and GGUF headers without a vocabulary."""
_LEAST = 1 << 15
"""Bytes fetched when one of many files is opened."""
_STEP = 1 << 16
"""Least size of a later request."""
_KEPT = 64 << 20
"""Bytes kept over all files; the files used least recently are dropped first."""
FRESH = 60.0
"""Seconds after which a file that is opened again is fetched again."""
_AT_ONCE = 16
"""Files whose first bytes are fetched at the same time."""
_AT_ONCE_BYTES = 8 << 20
"""Bytes of one request; larger reads are divided."""
_PARTS = 6
"""Requests for parts of one read at the same time."""


class Ranges:
    """One remote file: its entry, its first bytes, and other ranges that were read."""

    def __init__(self, path: RemotePath, backend: Backend, first: int) -> None:
        self.path, self._backend, self._lock = path, backend, threading.Lock()
        self.entry, head = backend.first(path, first)
        if len(head) != min(first, self.entry.size):
            raise RemoteError("the server sends a wrong size", file=path, expected=self.entry.size, found=len(head))
        self._head = bytearray(head)
        self._others: dict[int, bytes] = {}
        self.fetched = time.monotonic()
        self.ahead: Callable[[Ranges, int, memoryview], None] | None = None  # set by remote.read_ahead

    @property
    def kept(self) -> int:
        """Bytes held."""
        return len(self._head) + sum(map(len, self._others.values()))

    def start(self, n: int) -> memoryview:
        """Return the first bytes, at least n of them. Raises InputError for more than `limits.REMOTE_HEADER`."""
        n = min(n, self.entry.size)
        with self._lock:
            have = len(self._head)
            if n > have:
                if n > limits.REMOTE_HEADER:
                    raise InputError(
                        "the header is too large to be read from a URL",
                        file=self.path,
                        expected=f"at most {limits.REMOTE_HEADER} bytes",
                        found=n,
                        hint="download the file, then use the local copy",
                    )
                more = bytearray(min(self.entry.size, limits.REMOTE_HEADER, max(n, 2 * have)) - have)
                self._backend.read_into(self.path, self.entry, have, memoryview(more))
                self._head = self._head + more  # a new object: views of the old one stay valid
            return memoryview(self._head).toreadonly()

    def read(self, offset: int, n: int) -> memoryview:
        """Return n bytes, without a request if they were fetched before."""
        if offset + n <= len(self._head):
            return memoryview(self._head)[offset : offset + n]
        if offset <= len(self._head) and offset + n <= limits.REMOTE_HEADER:
            return self.start(offset + n)[offset : offset + n]
        with self._lock:
            for at, data in self._others.items():
                if at <= offset and offset + n <= at + len(data):
                    return memoryview(data)[offset - at : offset - at + n]
            fetched = bytearray(min(max(n, _STEP), self.entry.size - offset))
            self._backend.read_into(self.path, self.entry, offset, memoryview(fetched))
            if len(fetched) <= _KEPT // 8:
                self._others[offset] = bytes(fetched)
            return memoryview(fetched)[:n]

    def read_into(self, offset: int, out: memoryview) -> None:
        """Fill `out`; the fetched bytes are not kept."""
        if offset + len(out) <= len(self._head):
            out[:] = memoryview(self._head)[offset : offset + len(out)]
        elif self.ahead is not None:
            self.ahead(self, offset, out)
        else:
            self.fetch(offset, out)

    def fetch(self, offset: int, out: memoryview) -> None:
        """Fill `out` by requests, several at once if it is large."""
        cuts = [(at, out[at : at + _AT_ONCE_BYTES]) for at in range(0, len(out), _AT_ONCE_BYTES)]
        if len(cuts) < 2:
            self._backend.read_into(self.path, self.entry, offset, out)
            return
        with ThreadPoolExecutor(min(_PARTS, len(cuts)), thread_name_prefix="polyquant-parts") as pool:
            jobs = [pool.submit(self._backend.read_into, self.path, self.entry, offset + at, part) for at, part in cuts]
            for job in jobs:
                job.result()


_files: dict[str, Ranges] = {}
_absent: dict[str, tuple[float, InputError]] = {}
"""Files that do not exist: the time of the answer, and the error."""
_opening: dict[str, threading.Lock] = {}
_lock = threading.Lock()


def known(path: RemotePath, first: int = FIRST) -> Ranges:
    """Return the file's ranges; opens it if this process has not, with its first bytes.

    Raises RemoteError, InputError.
    """
    key = str(path)
    with _lock:
        own = _opening.setdefault(key, threading.Lock())
    with own:
        with _lock:
            if (found := _files.pop(key, None)) is not None:
                _files[key] = found  # now the most recently used
                return found
            if key in _absent:
                raise _absent[key][1].with_traceback(None)
        try:
            opened = Ranges(path, backend_of(path), first)
        except InputError as problem:
            with _lock:
                _absent[key] = (time.monotonic(), problem)
            raise
        with _lock:
            _files[key] = opened
            _evict(key)
        return opened


def _evict(newest: str) -> None:
    total = sum(file.kept for file in _files.values())
    for key in list(_files):
        if total <= _KEPT or key == newest:
            return
        total -= _files.pop(key).kept


def forget(wanted: Callable[[str], bool]) -> None:
    """Drop the files whose URL is wanted."""
    with _lock:
        for key in [key for key in (*_files, *_absent) if wanted(key)]:
            _files.pop(key, None)
            _absent.pop(key, None)


def stale(path: RemotePath) -> bool:
    """Return True if the file was fetched too long ago to be opened again without a request."""
    with _lock:
        found, absent = _files.get(str(path)), _absent.get(str(path))
    times = [*([found.fetched] if found else []), *([absent[0]] if absent else [])]
    return any(time.monotonic() - then > FRESH for then in times)


def fetch_ahead(paths: Iterable[RemotePath], header: Callable[[RemotePath], object] | None = None) -> None:
    """Fetch the first bytes of these files, and those that `header` reads, at the same time.

    Errors are left to the reader of the file.
    """
    wanted = list(paths)
    first = max(_LEAST, min(FIRST, _KEPT // 16 // max(1, len(wanted))))

    def fetch(path: RemotePath) -> None:
        with suppress(PolyquantError):
            known(path, first)
            if header is not None:
                header(path)

    if len(wanted) > 1:
        with ThreadPoolExecutor(min(_AT_ONCE, len(wanted)), thread_name_prefix="polyquant-headers") as pool:
            list(pool.map(fetch, wanted))
