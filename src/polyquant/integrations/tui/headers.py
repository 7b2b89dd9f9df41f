"""The headers of the models for the first screen, read by a forked process while this one imports Textual.

numpy and the reader take as long to import as Textual does; on two cores the first screen takes the longer of both
instead of their sum.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Any

from polyquant.integrations.tui.listing import Entry
from polyquant.no_collection import no_collection
from polyquant.storage.locations import is_remote

__all__ = ["Headers", "read_ahead"]


@dataclass(frozen=True, slots=True)
class Headers:
    """The facts and tensors of the first screen.

    problem: why the tensors of two models are matched by their stored names.
    """

    format: str
    architecture: str
    entries: tuple[Entry, ...]
    notes: tuple[str, ...] = ()
    b_format: str = ""
    problem: str = ""


def read_ahead(paths: tuple[str, ...], read: Callable[[], Headers]) -> Callable[[], Headers | None]:
    """Start read() in another process; returns the function that waits for its result, None if it had none.

    URLs are not read ahead: each process would fetch the headers for itself.
    """
    if any(is_remote(path) for path in paths) or not hasattr(os, "fork") or threading.active_count() > 1:
        return lambda: None
    source, sink = os.pipe()
    child = os.fork()
    if child == 0:
        _answer(sink, read)
    os.close(sink)

    def wait() -> Headers | None:
        with os.fdopen(source, "rb") as pipe:
            raw = pipe.read()
        os.waitpid(child, 0)
        return _from_json(json.loads(raw)) if raw else None

    return wait


def _answer(sink: int, read: Callable[[], Headers]) -> None:
    """The forked process: write the headers, or nothing after an error, which the caller meets again."""
    try:
        devnull = os.open(os.devnull, os.O_RDWR)
        for fd in range(3):
            os.dup2(devnull, fd)
        with no_collection():
            raw = json.dumps(astuple(read())).encode()
        with os.fdopen(sink, "wb") as pipe:
            pipe.write(raw)
    finally:
        os._exit(0)  # neither traceback nor the caller's exit handlers


def _from_json(value: list[Any]) -> Headers:
    form, architecture, entries, notes, b_format, problem = value
    return Headers(form, architecture, tuple(_entry(*entry) for entry in entries), tuple(notes), b_format, problem)


def _entry(name: str, shape: list[int], codec: str, nbytes: int, b_shape: list[int] | None, *rest: Any) -> Entry:
    return Entry(name, tuple(shape), codec, nbytes, None if b_shape is None else tuple(b_shape), *rest)
