"""Paths, URLs and models in stores. Every source is a pathlib path: `located` makes a RemotePath of a URL, finds the
files of a model in a store ("ollama:NAME", "oci:DIR:TAG", storage.stores), and makes a Path of anything else.

A RemotePath answers what the readers of formats ask of a path (`is_dir`, `iterdir`, `stat`, `/`), so they need not know
where a file is; `Source` reads its bytes. polyquant.storage.remote has one module per protocol. The
path of a URL never contains credentials: `remote.urls` keeps the user name, the password and the query string apart.
"""

from __future__ import annotations

import io
import os
import re
import stat
import threading
from collections.abc import Iterator
from pathlib import Path, PosixPath
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from polyquant.errors import UnsupportedError
from polyquant.storage.deferred import Deferred
from polyquant.storage.file_state import Entry
from polyquant.storage.remote.urls import parse
from polyquant.storage.stored_path import StoredPath

__all__ = [
    "Backend",
    "RemotePath",
    "backend_of",
    "forget",
    "is_folder",
    "is_reference",
    "is_remote",
    "located",
    "shown_path",
]

_BACKENDS = {
    "http": Deferred("polyquant.storage.remote.web:Web"),
    "https": Deferred("polyquant.storage.remote.web:Web"),
    "hf": Deferred("polyquant.storage.remote.hub:Hub"),
}
_OTHERS = Deferred("polyquant.storage.remote.objects:Objects")
_OPEN_FILE = Deferred("polyquant.storage.remote.source:RemoteFile")
_FORGET_RANGES = Deferred("polyquant.storage.remote.ranges:forget")
_STALE = Deferred("polyquant.storage.remote.ranges:stale")

_STORES = {
    "ollama:": Deferred("polyquant.storage.stores.ollama:resolve"),
    "oci:": Deferred("polyquant.storage.stores.layouts:resolve"),
}
_IS_MANIFEST = Deferred("polyquant.storage.stores.ollama:is_manifest")

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_REFERENCE = re.compile(r"(?:ollama|oci):(?!//)")


def located(path: str | os.PathLike[str]) -> Path:
    """Return a URL as a RemotePath, the files of a model in a store ("ollama:NAME", "oci:DIR:TAG", the path of a
    manifest in an Ollama store) as their path, anything else as a Path. Raises InputError for an invalid URL, and if a
    store does not have the model.
    """
    if isinstance(path, RemotePath | StoredPath):
        return path
    text = os.fspath(path)
    if isinstance(text, str) and _REFERENCE.match(text):
        found: Path = _STORES[text[: text.index(":") + 1]](text)
        return found
    if isinstance(text, str) and _URL.match(text):
        if text[:7].lower() == "file://":
            return Path(unquote(urlsplit(text).path))
        parts, changed = parse(text)
        remote = RemotePath(*parts)
        if changed or _STALE(remote):
            forget(remote)
        return remote
    where = Path(path)
    if where.parts[-5:-4] == ("manifests",) and _IS_MANIFEST(where):
        weights: Path = _STORES["ollama:"](where)
        return weights
    return where


def is_reference(path: str | os.PathLike[str]) -> bool:
    """Return True for a model in a store: "ollama:NAME", "oci:DIR:TAG" or the path of a manifest."""
    if isinstance(path, StoredPath):
        return True
    where = Path(path)
    named = _REFERENCE.match(os.fspath(path)) is not None
    return named or (where.parts[-5:-4] == ("manifests",) and bool(_IS_MANIFEST(where)))


def is_remote(path: str | os.PathLike[str] | None) -> bool:
    """Return True for a URL."""
    return path is not None and isinstance(located(path), RemotePath)


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Return True for a folder, False for an invalid name. Raises RemoteError."""
    where = located(path)
    return where.is_dir() if isinstance(where, RemotePath) else os.path.isdir(where)  # noqa: PTH112 - never fails


def shown_path(path: str | os.PathLike[str]) -> str:
    """Return the path as it may be printed and stored: a URL without its credentials, any other path as it is."""
    return str(located(path)) if _URL.match(os.fspath(path)) else os.fspath(path)


_made: dict[str, Backend] = {}
_lock = threading.Lock()


def backend_of(path: RemotePath) -> Backend:
    """Return the backend of a URL. Raises RemoteError for a missing package."""
    with _lock:
        if path.scheme not in _made:
            _made[path.scheme] = _BACKENDS.get(path.scheme, _OTHERS)(path)
        return _made[path.scheme]


def forget(path: RemotePath) -> None:
    """Drop the known state of a file or folder; the next request fetches it again."""
    base = str(path)
    _FORGET_RANGES(lambda key: key == base or key.startswith(f"{base}/"))
    if path.scheme in _made:
        _made[path.scheme].forget(path)


class RemotePath(PosixPath):
    """A URL as a path of parts ("hf:", "org", "name@revision", "file"). Paths derived from it are RemotePaths."""

    __slots__ = ()

    def __str__(self) -> str:
        scheme, *rest = self.parts or (".",)
        return (
            f"{scheme}//{'/'.join(rest)}" if scheme.endswith(":") else "/".join((scheme, *rest))
        )  # else a relative path

    def __repr__(self) -> str:
        return f"RemotePath({str(self)!r})"

    def __fspath__(self) -> str:
        return str(self)

    @property
    def scheme(self) -> str:
        """The URL's scheme, such as "https"."""
        return self.parts[0].removesuffix(":")

    def entry(self) -> Entry | None:
        """Return size and identity, None if there is no such file or folder. Raises RemoteError."""
        return backend_of(self).entry(self)

    # ------------------------------------------------------------ pathlib's interface

    def absolute(self) -> RemotePath:
        """Return the path itself."""
        return self

    def resolve(self, strict: bool = False) -> RemotePath:
        """Return the path itself: there are no links."""
        if strict and self.entry() is None:
            raise FileNotFoundError(f"{self} does not exist")
        return self

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Return size, kind and time; the inode number is a hash of the content's tag. Raises FileNotFoundError."""
        entry = self.entry()
        if entry is None:
            raise FileNotFoundError(f"{self} does not exist")
        inode, size, mtime_ns, ctime_ns = entry.state
        mode = stat.S_IFDIR | 0o555 if entry.folder else stat.S_IFREG | 0o444
        seconds = mtime_ns // 10**9
        times = {"st_mtime_ns": mtime_ns, "st_ctime_ns": ctime_ns}
        return os.stat_result((mode, inode, 0, 1, 0, 0, size, seconds, seconds, 0), times)

    def lstat(self) -> os.stat_result:
        """Return `stat`."""
        return self.stat()

    def exists(self, *, follow_symlinks: bool = True) -> bool:
        """Return True if it is a file or a folder."""
        return self.entry() is not None

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        """Return True for a file."""
        entry = self.entry()
        return entry is not None and not entry.folder

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        """Return True for a folder."""
        return backend_of(self).is_folder(self)

    def is_symlink(self) -> bool:
        """Return False."""
        return False

    def iterdir(self) -> Iterator[RemotePath]:  # type: ignore[override] # narrower than Path's
        """Yield the entries of the folder."""
        return (self / name for name in backend_of(self).names(self))

    def open(self, mode: str = "r", buffering: int = -1, *_: Any, **__: Any) -> Any:
        """Open for reading bytes ("rb")."""
        if mode != "rb":
            raise UnsupportedError(f"a URL cannot be opened with mode '{mode}'", file=self, expected="rb")
        raw = _OPEN_FILE(self)
        return raw if buffering == 0 else io.BufferedReader(raw, 1 << 20)

    def read_bytes(self) -> bytes:
        """Return the whole file."""
        with self.open("rb") as f:
            return bytes(f.read())

    def read_text(self, encoding: str | None = None, errors: str | None = None, newline: str | None = None) -> str:
        """Return the whole file as text."""
        return self.read_bytes().decode(encoding or "utf-8", errors or "strict")


class Backend(Protocol):
    """The files of one kind of URL. Methods raise RemoteError, and InputError if there is no such file."""

    def is_folder(self, path: RemotePath) -> bool:
        """Return True for a folder; no request if the URL alone tells."""

    def entry(self, path: RemotePath) -> Entry | None:
        """Return the file or folder, as known from the last request; None if there is none."""

    def current(self, path: RemotePath) -> Entry | None:
        """Return the file as it is on the server now."""

    def names(self, folder: RemotePath) -> list[str]:
        """List a folder: plain names, sorted."""

    def first(self, path: RemotePath, n: int) -> tuple[Entry, bytes]:
        """Open a file: its entry and its first n bytes, or all of a smaller file."""

    def read_into(self, path: RemotePath, entry: Entry, start: int, out: memoryview) -> None:
        """Fill `out` from offset `start`. Raises InputError if the file is no longer `entry`."""

    def forget(self, path: RemotePath) -> None:
        """Drop the known state of the path; the next request fetches it again."""
