"""Names in listings of untrusted servers."""

from __future__ import annotations

from collections.abc import Iterable

from polyquant.errors import InputError

__all__ = ["base_names"]


def base_names(names: Iterable[str], folder: object) -> dict[str, bool]:
    """Return the first part of each relative name in a listing, and whether it is a folder.

    Raises InputError for a name that leaves the folder.
    """
    out: dict[str, bool] = {}
    for name in names:
        parts = name.split("/")
        if not all(map(_plain, parts)):
            raise InputError("the server lists a name that leaves the folder", file=folder, found=name)
        out[parts[0]] = out.get(parts[0], False) or len(parts) > 1
    return out


def _plain(name: str) -> bool:
    return 0 < len(name) <= 1024 and name not in (".", "..") and not any(c == "\\" or ord(c) < 32 for c in name)
