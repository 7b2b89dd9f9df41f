"""s3://, gs://, az:// and every other URL of fsspec. Endpoints and credentials are those of its packages' own settings.

A folder is listed with one request, and its files are then known with size and ETag. Requests are repeated here, in
addition to the repetitions of the package.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, TypeVar

from polyquant.errors import InputError, PolyquantError, RemoteError, UnsupportedError, masked, printable
from polyquant.storage.file_state import Entry
from polyquant.storage.locations import RemotePath
from polyquant.storage.remote.extra import missing
from polyquant.storage.remote.names import base_names
from polyquant.storage.remote.retry import GIVE_UP, NEVER_REACHED, FailedRequestError, repeated

__all__ = ["Objects"]

T = TypeVar("T")
_TAGS = ("ETag", "etag", "generation", "md5Hash", "VersionId", "checksum", "uid")
_TIMES = ("LastModified", "last_modified", "updated", "mtime", "modified", "created")
_TALKATIVE = ("gcsfs", "s3fs", "adlfs", "aiobotocore", "botocore", "azure", "google")
"""Packages that log the requests they repeat, with tracebacks, to the terminal of a program without logging."""
_DENIED = "check the credentials of that service (environment, configuration file); they may have expired"


class Objects:
    """Backend of the URLs of fsspec."""

    def __init__(self, path: RemotePath) -> None:
        try:
            from fsspec.core import url_to_fs
        except ImportError:
            raise missing("fsspec", path) from None
        for package in _TALKATIVE:
            logging.getLogger(package).addHandler(logging.NullHandler())
        self._open: Callable[..., tuple[Any, str]] = url_to_fs
        self._reached = False
        self._entries: dict[str, Entry | None] = {}
        self._listed: dict[str, list[str]] = {}
        self._lock = threading.Lock()

    def is_folder(self, path: RemotePath) -> bool:
        """Return True for a folder: a common prefix of objects."""
        entry = self.entry(path)
        return entry is not None and entry.folder

    def entry(self, path: RemotePath) -> Entry | None:
        """Return the entry from the listing of its folder, or ask for it."""
        key = str(path)
        with self._lock:
            if key in self._entries:
                return self._entries[key]
            if str(path.parent) in self._listed:
                return None
        found = self.current(path)
        with self._lock:
            self._entries[key] = found
        return found

    def current(self, path: RemotePath) -> Entry | None:
        """Ask for size and ETag."""
        try:
            return self.call(path, lambda fs, inside: _entry(_refreshed(fs, inside).info(inside)))
        except InputError:
            return None

    def names(self, folder: RemotePath) -> list[str]:
        """List a folder with one request; the entries are kept."""
        with self._lock:
            if (known := self._listed.get(str(folder))) is not None:
                return known

        def ask(fs: Any, inside: str) -> dict[str, Entry]:
            prefix, out = inside.rstrip("/") + "/", {}
            for info in _refreshed(fs, inside).ls(inside, detail=True):
                full = str(info["name"]).strip("/")
                name = full[len(prefix.lstrip("/")) :] if full.startswith(prefix.lstrip("/")) else f"/{full}"
                if full != inside.strip("/"):  # a placeholder for the folder itself
                    out[name] = _entry(info)
            return out

        found = self.call(folder, ask)
        names = sorted(base_names(found, folder))
        with self._lock:
            self._entries |= {str(folder / name): entry for name, entry in found.items()}
            self._listed[str(folder)] = names
        return names

    def first(self, path: RemotePath, n: int) -> tuple[Entry, bytes]:
        """Read the first bytes of an object whose size is known."""
        entry = self.entry(path)
        if entry is None or entry.folder:
            found = "a folder" if entry else None
            raise InputError("does not exist on the server", file=path, found=found, hint="check the address")
        data = bytearray(min(n, entry.size))
        self.read_into(path, entry, 0, memoryview(data))
        return entry, bytes(data)

    def read_into(self, path: RemotePath, entry: Entry, start: int, out: memoryview) -> None:
        """Read one range."""
        n = len(out)
        if not n:
            return

        def ask(fs: Any, inside: str) -> None:
            data = fs.cat_file(inside, start=start, end=start + n)
            if len(data) > n:
                raise RemoteError("the server sends another range", file=path, expected=n, found=len(data))
            if len(data) < n:
                raise FailedRequestError(f"the answer has {len(data)} of {n} bytes")
            out[:] = data

        self.call(path, ask)

    def forget(self, path: RemotePath) -> None:
        """Drop the known state of the path and of all paths below it."""
        base = str(path)
        with self._lock:
            known = {*self._entries, *self._listed}
            for key in (key for key in known if key == base or key.startswith(f"{base}/")):
                self._entries.pop(key, None)
                self._listed.pop(key, None)

    def call(self, path: RemotePath, ask: Callable[[Any, str], T], doing: str = "read") -> T:
        """Call a function with the file system and the path inside it; errors become those of polyquant.

        doing: "read" or "written", for messages. Failed requests are repeated.
        """

        def attempt() -> T:
            try:
                answer = ask(*self._open(str(path)))
                self._reached = True
                return answer
            except (PolyquantError, FailedRequestError):
                raise
            except Exception as problem:  # noqa: BLE001 - each package of fsspec has its own exceptions
                raise _translated(problem, path, doing) from None

        return repeated(path, attempt, doing, GIVE_UP if self._reached else NEVER_REACHED)


def _refreshed(fs: Any, inside: str) -> Any:
    fs.invalidate_cache(inside)
    return fs


def _entry(info: Mapping[str, Any]) -> Entry:
    size = info.get("size") or 0
    tag = next((str(info[key]) for key in _TAGS if info.get(key)), "")
    when = next((info[key] for key in _TIMES if info.get(key)), 0)
    if not isinstance(size, int) or not 0 <= size < 1 << 62:
        raise RemoteError("the server sends an invalid size", found=size)
    return Entry(size, tag, _nanoseconds(when), info.get("type") == "directory")


def _nanoseconds(when: object) -> int:
    if isinstance(when, str):
        try:
            when = datetime.fromisoformat(when)
        except ValueError:
            return 0
    seconds = when.timestamp() if isinstance(when, datetime) else when
    return max(0, int(seconds * 1e9)) if isinstance(seconds, int | float) else 0


def _translated(problem: Exception, path: RemotePath, doing: str) -> Exception:
    name, module = type(problem).__name__, type(problem).__module__
    text = printable(masked(str(problem)), 160)
    if isinstance(problem, FileNotFoundError | IsADirectoryError):
        return InputError("does not exist on the server", file=path, hint="check the address")
    if isinstance(problem, ImportError):
        return missing(text, path)
    if isinstance(problem, ValueError) and "rotocol not known" in text:
        return UnsupportedError("no package opens URLs of this kind", file=path, hint="see docs/remote.md")
    status = next((s for key in ("status", "code", "status_code") if isinstance(s := getattr(problem, key, 0), int)), 0)
    named = any(word in name for word in ("Credential", "Token", "Auth")) or module.startswith("google.auth")
    if isinstance(problem, PermissionError) or named or status in (401, 403):
        return RemoteError(f"access is denied: {text}", file=path, hint=_DENIED)
    if isinstance(problem, ValueError | TypeError | KeyError) or (400 <= status < 500 and status not in (408, 429)):
        return RemoteError(f"cannot be {doing}: {name}: {text}", file=path)
    return FailedRequestError(f"{name}: {text}")
