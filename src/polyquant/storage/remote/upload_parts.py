"""The parts of a multipart upload, planned in advance, and those in progress.

A file is cut into parts of one size, so a part's number, length and content follow from the layout alone, and a part
that is uploaded twice is the same part. Threads write in any order; a part is uploaded as soon as its last byte is
written. Parts in progress are kept in memory up to a budget, and in a temporary file beyond it: an output whose tensors
are not made in the order of their offsets has many parts in progress.
"""

from __future__ import annotations

import tempfile
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from polyquant.storage.spans import spans_by_file
from polyquant.types import FilePlan, Layout

__all__ = ["Assembler", "FileParts", "file_parts", "part_bytes"]

_MIB = 1 << 20
_LEAST = 8 << 20
"""Smallest part. S3 accepts 5 MiB."""
_MOST = 9000
"""Most parts of a file. S3 accepts 10,000."""
_UPLOADS = 4
"""Parts uploaded at the same time."""

Key = tuple[int, int]
"""(index of the file, number of the part from 1)."""


def part_bytes(size: int) -> int:
    """Bytes per part of a file of this size."""
    return max(_LEAST, -(-size // (_MOST * _MIB)) * _MIB)


class FileParts:
    """The parts of one file. spans: disjoint ranges [start, stop) of its payload, sorted."""

    def __init__(self, file: FilePlan, spans: Iterable[tuple[int, int]]) -> None:
        self.file, self.size = file, part_bytes(file.size)
        self._spans = _merged(spans)
        self._stops = [stop for _, stop in self._spans]
        self._pieces = sorted(file.pieces)

    @property
    def streams(self) -> bool:
        """True if the file has payload; other files are known in advance and uploaded at the end."""
        return bool(self._spans)

    @property
    def count(self) -> int:
        """Number of parts."""
        return -(-self.file.size // self.size)

    def span(self, number: int) -> tuple[int, int]:
        """The bytes [start, stop) of a part."""
        start = (number - 1) * self.size
        return start, min(start + self.size, self.file.size)

    def numbers(self, start: int, stop: int) -> range:
        """The parts with bytes of [start, stop)."""
        return range(start // self.size + 1, (stop - 1) // self.size + 2) if start < stop else range(0)

    def payload(self, number: int) -> list[tuple[int, int]]:
        """The ranges of payload in a part, relative to its start."""
        start, stop = self.span(number)
        first, last = bisect_right(self._stops, start), bisect_left(self._spans, (stop,))
        return [(max(a, start) - start, min(b, stop) - start) for a, b in self._spans[first:last]]

    def known(self, number: int) -> bytearray:
        """The bytes of a part that are known in advance; payload is zero."""
        start, stop = self.span(number)
        out = bytearray(stop - start)
        for offset, data in self._pieces:
            a, b = max(offset, start), min(offset + len(data), stop)
            if a < b:
                out[a - start : b - start] = data[a - offset : b - offset]
        return out


def file_parts(layout: Layout) -> list[FileParts]:
    """The parts of every file of a layout."""
    spans = spans_by_file(layout)
    return [FileParts(f, spans[f.name]) for f in layout.files]


def _merged(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    out: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if out and start <= out[-1][1]:
            out[-1] = out[-1][0], max(stop, out[-1][1])
        else:
            out.append((start, stop))
    return out


@dataclass(slots=True)
class _Part:
    """A part in progress. data: its bytes, or None if they are at `at` of the temporary file.

    missing: ranges that are not written yet, sorted.
    """

    missing: list[tuple[int, int]]
    length: int
    data: bytearray | None
    at: int = 0

    def wrote(self, start: int, stop: int) -> None:
        """Remove [start, stop) from the missing ranges."""
        first = bisect_left(self.missing, (start,))
        if first and self.missing[first - 1][1] > start:
            first -= 1
        last = first
        kept = []
        while last < len(self.missing) and self.missing[last][0] < stop:
            a, b = self.missing[last]
            kept += [(x, y) for x, y in ((a, min(b, start)), (max(a, stop), b)) if x < y]
            last += 1
        self.missing[first:last] = kept


class Assembler:
    """Collects the bytes of all files and uploads each part when it is complete. Thread-safe.

    upload: called on several threads with the key of a part and its bytes. budget: bytes for parts in memory; `write`
    waits for uploads when they exceed it. spool: folder of the temporary file.
    """

    def __init__(
        self, files: Sequence[FileParts], upload: Callable[[Key, bytearray], None], budget: int, spool: Path
    ) -> None:
        self._files, self._upload, self._budget = files, upload, budget
        self._open: dict[Key, _Part] = {}
        self._complete: set[Key] = set()
        self._held = self._busy = 0
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._pool = ThreadPoolExecutor(_UPLOADS, "upload")
        self._spool, self._one_spooled = _Spool(spool), threading.Lock()

    def start(self, stored: Iterable[Key]) -> None:
        """Begin. stored: parts uploaded by an earlier run. Parts without payload are uploaded now."""
        self._complete.update(stored)
        for i, file in enumerate(self._files):
            if file.streams:
                for number in range(1, file.count + 1):
                    if not file.payload(number):
                        self._write(file, (i, number), 0, memoryview(b""))

    def write(self, index: int, offset: int, data: memoryview) -> None:
        """Write payload at an offset of a file. Raises the error of a failed upload."""
        file = self._files[index]
        for number in file.numbers(offset, offset + len(data)):
            start, stop = file.span(number)
            a, b = max(offset, start), min(offset + len(data), stop)
            self._write(file, (index, number), a - start, data[a - offset : b - offset])

    def _write(self, file: FileParts, key: Key, inside: int, data: memoryview) -> None:
        with self._changed:
            part = self._part(file, key)
            if part is None:
                return
            if part.data is not None:
                part.data[inside : inside + len(data)] = data
            else:
                self._spool.write(part.at + inside, data)
            part.wrote(inside, inside + len(data))
            if part.missing:
                return
            del self._open[key]
            self._complete.add(key)
            self._busy += 1
        self._pool.submit(self._send, key, part)

    def _part(self, file: FileParts, key: Key) -> _Part | None:
        """The part in progress, a new one when memory allows; None if it is complete. Called with the lock."""
        start, stop = file.span(key[1])
        while True:
            if self._error is not None:
                raise self._error
            if key in self._complete:
                return None
            if key in self._open:
                return self._open[key]
            fits = self._held + stop - start <= self._budget
            if fits or not self._busy:
                break
            self._changed.wait()
        data = file.known(key[1])
        part = self._open[key] = _Part(file.payload(key[1]), len(data), data)
        if fits:
            self._held += len(data)
        else:
            part.data, part.at = None, self._spool.add(data)
        return part

    def _send(self, key: Key, part: _Part) -> None:
        try:
            if self._error is None:
                if part.data is not None:
                    self._upload(key, part.data)
                else:
                    with self._one_spooled:
                        self._upload(key, self._spool.take(part.at, part.length))
        except BaseException as problem:  # noqa: BLE001 - raised again in the thread that writes or settles
            with self._changed:
                self._error = self._error or problem
        finally:
            with self._changed:
                self._busy -= 1
                if part.data is not None:
                    self._held -= part.length
                    part.data = None
                self._changed.notify_all()

    def settle(self) -> None:
        """Wait for all uploads. Raises the error of a failed one."""
        with self._changed:
            self._changed.wait_for(lambda: not self._busy)
            if self._error is not None:
                raise self._error
            assert not self._open, f"{len(self._open)} parts are incomplete"

    def close(self) -> None:
        """Stop: uploads that have begun end, others never begin."""
        with self._changed:
            self._error = self._error or InterruptedError("the upload has ended")
        self._pool.shutdown(wait=True)
        self._spool.close()


class _Spool:
    """A temporary file of equal places for parts that do not fit into memory; places are reused."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._end = folder, 0
        self._file: IO[bytes] | None = None
        self._free: dict[int, list[int]] = {}
        self._lock = threading.Lock()

    def add(self, data: bytearray) -> int:
        """Write the first content of a part and return its place."""
        with self._lock:
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115 - until close
            free = self._free.setdefault(len(data), [])
            at = free.pop() if free else self._end
            self._end = max(self._end, at + len(data))
        self.write(at, memoryview(data))
        return at

    def write(self, at: int, data: memoryview) -> None:
        """Write bytes at an offset."""
        with self._lock:
            assert self._file is not None
            self._file.seek(at)
            while data:
                data = data[self._file.write(data) :]

    def take(self, at: int, n: int) -> bytearray:
        """Read a part and free its place."""
        out = bytearray(n)
        with self._lock:
            assert self._file is not None
            self._file.seek(at)
            view = memoryview(out)
            while view:
                got = self._file.readinto(view)  # type: ignore[attr-defined] # of an unbuffered file
                view = view[got:]
            self._free[n].append(at)
        return out

    def close(self) -> None:
        """Remove the file."""
        if self._file is not None:
            self._file.close()
