"""Parse the headers and indexes of unchanged files once: opening a checkpoint and checking it read the same ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from polyquant.storage.source import FileState, Source

__all__ = ["parsed_once", "recall", "remember"]

_known: ContextVar[dict[FileState, Any] | None] = ContextVar("parsed files", default=None)


@contextmanager
def parsed_once(known: dict[FileState, Any] | None = None) -> Iterator[None]:
    """Within the block, a header or index that was valid is not parsed again while its file does not change.

    known: results of earlier blocks; new ones are added. A block inside another one shares its results.
    """
    shared = _known.get() if known is None else known
    token = _known.set({} if shared is None else shared)
    try:
        yield
    finally:
        _known.reset(token)


def recall(source: Source) -> Any:
    """Return the parsed content of this file; None if it is not known, or outside of `parsed_once`."""
    known = _known.get()
    return None if known is None else known.get(source.state())


def remember(source: Source, parsed: Any) -> None:
    """Keep the parsed content of this file until the end of `parsed_once`. Callers must not change it."""
    known = _known.get()
    if known is not None:
        known[source.state()] = parsed
