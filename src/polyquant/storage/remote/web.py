"""https:// (and http://): single files of any web server that supports ranges. There are no listings, so no folders."""

from __future__ import annotations

from urllib.parse import quote

from polyquant.errors import InputError, RemoteError
from polyquant.storage.file_state import Entry
from polyquant.storage.locations import RemotePath
from polyquant.storage.remote import ranges
from polyquant.storage.remote.http import Resource, open_range, read_range
from polyquant.storage.remote.urls import access_of

__all__ = ["Web"]

_DENIED = "check the user name and password in the URL; a signed URL may have expired"
_HINTS = {401: _DENIED, 403: _DENIED, 404: "check the address", 407: "the proxy wants a user name and password"}
_SAFE = "/:[]@!$&'()*+,;=%~"


class Web:
    """Backend of https:// and http://."""

    def __init__(self, _: RemotePath) -> None:
        self._resources: dict[str, Resource] = {}

    def is_folder(self, path: RemotePath) -> bool:
        """Return False: a web server does not list folders."""
        return False

    def entry(self, path: RemotePath) -> Entry | None:
        """Return the entry from the answer with the file's first bytes; None for status 404."""
        try:
            return ranges.known(path).entry
        except InputError:
            return None

    def current(self, path: RemotePath) -> Entry | None:
        """Ask for one byte."""
        try:
            return open_range(self._resource(path), 1).entry
        except InputError:
            return None

    def names(self, folder: RemotePath) -> list[str]:
        """Raise InputError."""
        raise InputError("a web server does not list folders", file=folder, hint="give the URL of a file")

    def first(self, path: RemotePath, n: int) -> tuple[Entry, bytes]:
        """Read the first bytes; the answer has the size and the ETag."""
        return open_range(self._resource(path), n)

    def read_into(self, path: RemotePath, entry: Entry, start: int, out: memoryview) -> None:
        """Read one range."""
        read_range(self._resource(path), entry, start, out)

    def forget(self, path: RemotePath) -> None:
        """Drop the redirects and credentials of the file."""
        self._resources.pop(str(path), None)

    def _resource(self, path: RemotePath) -> Resource:
        known = self._resources.get(str(path))
        if known is None:
            access = access_of(path.parts)
            if access.authorization is not None and path.scheme == "http" and not _loopback(path):
                raise RemoteError("credentials are not sent over http", file=path, hint="use https")
            url = quote(str(path), safe=_SAFE) + (f"?{access.query}" if access.query else "")
            known = self._resources[str(path)] = Resource(path, url, access.authorization, _HINTS)
        return known


def _loopback(path: RemotePath) -> bool:
    return path.parts[1].rpartition(":")[0] in ("localhost", "127.0.0.1", "[::1]")
