"""Counts the calls of a process that change the file system, and disturbs one of them.

A disturbance is applied to the n-th call:

    kill        the process dies before it
    half        half of the bytes of a write arrive, then the process dies
    twice       so does the process that repeats the job
    ENOSPC ...  the call fails with this error once
    full        this call and all later ones that need space fail with ENOSPC
    readonly    this call and all later ones fail with EROFS
    short       no n: every write transfers only half of its bytes

Python's own calls (`open`, shutil, ...) that bypass the functions replaced here raise `EscapedError`: an audit hook
sees them.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from polyquant.conversion import execute
from polyquant.storage import renames

__all__ = ["ALWAYS", "DISTURBANCES", "ERRORS", "KILLS", "SYNCS", "Call", "Changes"]

ERRORS = ("ENOSPC", "EIO", "EACCES")
ALWAYS = ("full", "readonly")
KILLS = ("kill", "half", "twice")
DISTURBANCES = (*KILLS, *ERRORS, *ALWAYS)
SYNCS = ("fsync", "fdatasync")

_WRITES = {"write": 1, "pwrite": 1, "copy_file_range": 2}
"""Calls that transfer bytes, and the position of the argument that has or limits them."""
_GROWS = {*_WRITES, "open", "mkdir", "ftruncate", "fsync", "link", "symlink"}
_PLAIN = (
    "mkdir", "rename", "replace", "unlink", "remove", "rmdir", "link", "symlink", "ftruncate", "truncate", "fsync",
    "fdatasync", "chmod", "fchmod", "utime", "mknod", "mkfifo", "writev", "pwritev", "sendfile", "posix_fallocate",
)  # fmt: skip
_MODES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_EVENTS = {f"os.{name}" for name in ("mkdir", "rename", "remove", "rmdir", "link", "symlink", "truncate", "chmod",
                                     "utime", "mknod", "mkfifo", "posix_fallocate")}  # fmt: skip


class EscapedError(BaseException):
    """A change that no replaced function has seen."""


@dataclass(frozen=True, slots=True)
class Call:
    """One change: the name of the function, the bytes of a write, and the first argument if it is a path."""

    name: str
    nbytes: int = 0
    path: str = ""


@dataclass
class Changes:
    """The changes of this process. at: the call to disturb; how: see above, "" to count only."""

    at: int = -1
    how: str = ""
    calls: list[Call] = field(default_factory=list)
    _inside: bool = False

    def arm(self) -> None:
        """Replace the functions of `os` in this process, and run conversions on one thread in a fixed order."""
        for name in (*_PLAIN, *_WRITES):
            if hasattr(os, name):
                setattr(os, name, self._wrapped(name, getattr(os, name)))
        os.open = self._open(os.open)
        renames._rename = self._wrapped("renameat2", renames._rename)
        execute.ThreadPoolExecutor = _Inline
        sys.addaudithook(self._audit)

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if self._inside:
            return
        if event in _EVENTS:
            raise EscapedError(event, args)
        if event == "open" and not isinstance(args[0], int) and args[2] & _MODES and args[0] != os.devnull:
            raise EscapedError(event, args)

    def _open(self, call: Callable) -> Callable:
        changing = self._wrapped("open", call)

        def open_(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
            return (changing if flags & _MODES else call)(path, flags, *args, **kwargs)

        return open_

    def _wrapped(self, name: str, call: Callable) -> Callable:
        def changing(*args: Any, **kwargs: Any) -> Any:
            path = os.fsdecode(args[0]) if isinstance(args[0], str | bytes | os.PathLike) else ""
            nbytes = _size(args[_WRITES[name]]) if name in _WRITES else 0
            n = len(self.calls)
            self.calls.append(Call(name, nbytes, path))
            if self._hit(n, name):
                self._disturb(name, call, args, kwargs, path, nbytes)
            if self.how == "short" and nbytes > 1:
                args = _halved(name, args)
            return self.perform(name, call, args, kwargs)

        return changing

    def perform(self, name: str, call: Callable, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Make a call that is not disturbed. name: of the function."""
        return self._call(call, args, kwargs)

    def _hit(self, n: int, name: str) -> bool:
        if self.how in ALWAYS and 0 <= self.at < n:
            return self.how == "readonly" or name in _GROWS
        return n == self.at

    def _disturb(self, name: str, call: Callable, args: tuple[Any, ...], kwargs: Any, path: str, nbytes: int) -> None:
        if self.how in ("kill", "half"):
            try:
                if self.how == "half" and nbytes > 1:
                    self._call(call, _halved(name, args), kwargs)
            finally:
                os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "full" and name not in _GROWS:
            return
        code = {"full": errno.ENOSPC, "readonly": errno.EROFS}.get(self.how) or getattr(errno, self.how)
        raise OSError(code, os.strerror(code), *([path] if path else []))

    def _call(self, call: Callable, args: tuple[Any, ...], kwargs: Any) -> Any:
        before, self._inside = self._inside, True
        try:
            return call(*args, **kwargs)
        finally:
            self._inside = before


def _size(argument: Any) -> int:
    return argument if isinstance(argument, int) else memoryview(argument).nbytes


def _halved(name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    at = _WRITES[name]
    whole = args[at]
    half = whole // 2 if isinstance(whole, int) else memoryview(whole).cast("B")[: _size(whole) // 2]
    return (*args[:at], half, *args[at + 1 :])


class _Inline:
    """A thread pool that runs each job at once, so that every run makes the same calls in the same order."""

    def __init__(self, workers: int) -> None:
        assert workers >= 1

    def __enter__(self) -> _Inline:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, job: Callable, *args: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(job(*args))
        except BaseException as problem:  # noqa: BLE001 - raised by result(), as in a real pool
            done.set_exception(problem)
        return done
