"""Files to be written as a sequence of bytes and of ranges of other files, hashed while they are copied."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from polyquant.storage.source import Source
from polyquant.types import U8

__all__ = ["Piece", "Span", "copy_hashed", "length"]

_AT_ONCE = 4 << 20


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of a file: nbytes at start."""

    source: Source
    start: int
    nbytes: int


Piece = bytes | Span


def length(pieces: Iterable[Piece]) -> int:
    """Return the number of bytes."""
    return sum(len(p) if isinstance(p, bytes) else p.nbytes for p in pieces)


def copy_hashed(pieces: Sequence[Piece], fd: int | None, on_bytes: Callable[[int], None] = lambda n: None) -> str:
    """Write pieces to a file and return the SHA-256 of the bytes in hexadecimal. Raises InputError, OSError.

    fd: None hashes only. Another thread hashes a chunk while this one writes it and reads the next: the time is that of
    the slower of the two. on_bytes: called with the bytes done since the last call.
    """
    state = hashlib.sha256()
    with ThreadPoolExecutor(1) as pool:
        hashing: list[Future[None]] = []
        for chunk in _chunks(pieces):
            hashing.append(pool.submit(state.update, chunk.data))
            if fd is not None:
                view = chunk.data
                while view:
                    view = view[os.write(fd, view) :]
            if len(hashing) > 1:
                hashing.pop(0).result()
            on_bytes(len(chunk))
    return state.hexdigest()


def _chunks(pieces: Sequence[Piece]) -> Iterator[U8]:
    """Yield the bytes in chunks. A chunk may be changed after the next but one was requested."""
    buffers, turn = [np.empty(0, np.uint8)] * 3, 0
    for piece in pieces:
        if isinstance(piece, bytes):
            if piece:
                yield np.frombuffer(piece, np.uint8)
            continue
        for at in range(0, piece.nbytes, _AT_ONCE):
            n = min(_AT_ONCE, piece.nbytes - at)
            if len(buffers[turn]) < n:
                buffers[turn] = np.empty(n, np.uint8)
            chunk = buffers[turn][:n]
            piece.source.read_into(piece.start + at, chunk)
            yield chunk
            turn = (turn + 1) % len(buffers)
