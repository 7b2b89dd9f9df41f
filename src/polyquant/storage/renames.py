"""Renames that `os` lacks: an atomic exchange of two names, and a rename that never replaces; sync of a folder.

Linux has renameat2 (man 2 renameat2), macOS renamex_np. On other systems and file systems `exchange` returns False and
`rename_new` falls back to a hard link, which also fails if the name exists.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["exchange", "named", "rename_new", "sync_folder"]

_AT_FDCWD = -100
_UNSUPPORTED = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}
_NEW, _EXCHANGE = "new", "exchange"
_FLAGS = {"renameat2": {_NEW: 1, _EXCHANGE: 2}, "renamex_np": {_NEW: 4, _EXCHANGE: 2}}


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Add the file name to an OSError from a descriptor."""
    try:
        yield
    except OSError as e:
        e.filename = str(path)
        raise


def sync_folder(path: Path) -> None:
    """Sync a folder, so that renames inside it are durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with named(path):
            os.fsync(fd)
    finally:
        os.close(fd)


def exchange(a: Path, b: Path) -> bool:
    """Swap two names atomically. Returns False if the system cannot. Raises OSError."""
    return _rename(a, b, _EXCHANGE)


def rename_new(old: Path, new: Path) -> None:
    """Rename `old` to `new`, which must not exist. Raises FileExistsError, OSError."""
    if _rename(old, new, _NEW):
        return
    if not old.is_dir():
        try:
            os.link(old, new, follow_symlinks=False)
        except FileExistsError:
            raise
        except OSError:  # a file system without hard links
            pass
        else:
            sync_folder(new.parent)  # after a power loss the file has at least one of the names
            old.unlink()
            return
    if os.path.lexists(new):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(new))
    old.rename(new)


def _rename(old: Path, new: Path, how: str) -> bool:
    import ctypes

    libc, name = _libc()
    if name is None:
        return False
    paths = os.fsencode(old), os.fsencode(new)
    flag = _FLAGS[name][how]
    if name == "renameat2":
        failed = libc.renameat2(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], flag)
    else:
        failed = libc.renamex_np(*paths, flag)
    if not failed:
        return True
    code = ctypes.get_errno()
    if code in _UNSUPPORTED:
        return False
    raise OSError(code, os.strerror(code), str(new))


@cache
def _libc() -> tuple[Any, str | None]:
    """Return the C library, and the name of its rename function or None."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    return libc, next((name for name in _FLAGS if hasattr(libc, name)), None)
