"""Fetch the data of a conversion shortly before it is read, in requests of a few megabytes.

The plan of a conversion tells which bytes are read and in which order. They become pieces: neighbouring spans of a file
are joined, long ones are cut. A few threads fetch the pieces in that order, as many as fit into a window of memory. A
reader copies from the pieces; one that is not fetched yet it fetches itself, so the order is only a hint.

    spans   | norm | q           | k   |  gap  | gate
    pieces  | 0         | 1            |       | 2 ...
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum

from polyquant.errors import PolyquantError
from polyquant.storage.remote.ranges import Ranges
from polyquant.storage.remote.source import RemoteSource
from polyquant.storage.source import Source

__all__ = ["fetching"]

_PIECE = 4 << 20
"""Largest bytes of one request."""
_GAP = 1 << 16
"""Gaps of at most this size are fetched rather than skipped."""
_THREADS = 8
_SLACK = 64
"""A piece that is N pieces before the last one read will not be read any more."""


class _State(Enum):
    WAITING = 0
    FETCHING = 1
    READY = 2
    DONE = 3


@dataclass(slots=True, eq=False)
class _Piece:
    """Bytes [start, stop) of a file; `wanted` of them are in spans."""

    file: Ranges
    index: int
    start: int
    stop: int
    wanted: int
    state: _State = _State.WAITING
    data: bytearray = field(default_factory=bytearray)


@contextmanager
def fetching(spans: Iterable[tuple[Source, int, int]], window: int) -> Iterator[None]:
    """Fetch these spans (source, offset, bytes) ahead of their readers within the block.

    window: bytes of memory for fetched data.
    """
    ahead = _ReadAhead(list(_pieces(spans, max(1 << 19, min(_PIECE, window // 8)))), window)
    try:
        yield
    finally:
        ahead.close()


def _pieces(spans: Iterable[tuple[Source, int, int]], most: int) -> Iterator[_Piece]:
    """Join and cut the spans, in their order."""
    open_piece, count = None, 0
    for source, offset, n in spans:
        if not isinstance(source, RemoteSource):
            continue
        file, at, end = source.ranges, offset, offset + n
        while at < end:
            p = open_piece
            if p is None or p.file is not file or not 0 <= at - p.stop <= _GAP or at >= p.start + most:
                if p is not None:
                    yield p
                p = open_piece = _Piece(file, count, at, at, 0)
                count += 1
            stop = min(end, p.start + most)
            p.wanted += stop - at
            p.stop = at = stop
    if open_piece is not None:
        yield open_piece


class _ReadAhead:
    """The pieces, the threads that fetch them, and the memory that they take."""

    def __init__(self, pieces: Sequence[_Piece], window: int) -> None:
        self._pieces, self._free = pieces, window
        self._changed = threading.Condition()
        self._next = self._frontier = 0
        self._closed = False
        self._by_file: dict[Ranges, tuple[list[int], list[_Piece]]] = {}
        for file in {p.file for p in pieces}:
            own = sorted((p for p in pieces if p.file is file), key=lambda p: (p.start, p.index))
            self._by_file[file] = [p.start for p in own], own
            file.ahead = self.read_into
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="polyquant-fetch")
        with self._changed:
            self._advance()

    def close(self) -> None:
        """Stop fetching and free the memory."""
        for file in self._by_file:
            file.ahead = None
        with self._changed:
            self._closed = True
            for piece in self._pieces:
                piece.state, piece.data = _State.DONE, bytearray()
            self._changed.notify_all()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def read_into(self, file: Ranges, offset: int, out: memoryview) -> None:
        """Fill `out` from the pieces of the file; bytes outside of them are fetched separately."""
        done = 0
        while done < len(out):
            at = offset + done
            piece, limit = self._find(file, at)
            n = min(len(out) - done, limit - at)
            if piece is None or not self._take(piece, at, out[done : done + n]):
                file.fetch(at, out[done : done + n])
            done += n

    def _find(self, file: Ranges, at: int) -> tuple[_Piece | None, int]:
        """Return the first unread piece with this byte, and the end of the piece or of the gap."""
        starts, own = self._by_file[file]
        i = bisect_right(starts, at)
        found = [p for p in own[max(0, i - 4) : i] if p.stop > at and p.state is not _State.DONE]
        if found:
            piece = min(found, key=lambda p: p.index)
            return piece, piece.stop
        return None, starts[i] if i < len(starts) else file.entry.size

    def _take(self, piece: _Piece, at: int, out: memoryview) -> bool:
        """Copy from a piece, which is awaited or fetched first. Returns False if it cannot be used."""
        with self._changed:
            mine = piece.state is _State.WAITING
            if mine:
                piece.state = _State.FETCHING
                self._free -= piece.stop - piece.start
        if mine:
            self._fetch(piece)
        with self._changed:
            self._changed.wait_for(lambda: piece.state is not _State.FETCHING)
            if piece.state is not _State.READY:
                return False
            data = piece.data
        out[:] = memoryview(data)[at - piece.start : at - piece.start + len(out)]
        with self._changed:
            self._frontier = max(self._frontier, piece.index)
            piece.wanted -= len(out)
            if piece.wanted <= 0 and piece.state is _State.READY:
                self._drop(piece)
            self._advance()
        return True

    def _fetch(self, piece: _Piece) -> None:
        """Fetch a piece whose state is FETCHING. After an error the readers fetch for themselves, and report it."""
        data, state = bytearray(piece.stop - piece.start), _State.READY
        try:
            piece.file.fetch(piece.start, memoryview(data))
        except PolyquantError:
            state = _State.DONE
        with self._changed:
            if piece.state is _State.FETCHING:
                piece.state = state
                if state is _State.READY:
                    piece.data = data
                else:
                    self._free += len(data)
            self._changed.notify_all()

    def _drop(self, piece: _Piece) -> None:
        self._free += len(piece.data)
        piece.state, piece.data = _State.DONE, bytearray()

    def _advance(self) -> None:
        """Start to fetch the next pieces that fit into the window."""
        for piece in self._pieces[max(0, self._frontier - 4 * _SLACK) : max(0, self._frontier - _SLACK)]:
            if piece.state is _State.READY:
                self._drop(piece)
        while not self._closed and self._next < len(self._pieces):
            piece = self._pieces[self._next]
            if piece.state is _State.WAITING:
                if piece.stop - piece.start > self._free:
                    return
                piece.state = _State.FETCHING
                self._free -= piece.stop - piece.start
                self._pool.submit(self._fetch, piece)
            self._next += 1
