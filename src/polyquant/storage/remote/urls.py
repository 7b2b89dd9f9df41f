"""Parse URLs. Their credentials are kept here and nowhere else: a RemotePath, and so every message, has none.

    https://USER:PASSWORD@host/folder/model.gguf?SIGNATURE
    RemotePath  https://host/folder/model.gguf          printed, stored in reports
    Access      SIGNATURE, "Basic ..."                  used in requests to that host

The query string of a file also applies to the other files of its folder that have none: the shards of a split model, of
which the user names one.
"""

from __future__ import annotations

import base64
import re
import threading
from typing import NamedTuple
from urllib.parse import quote, unquote, urlsplit

from polyquant.errors import InputError

__all__ = ["Access", "access_of", "parse"]

_SEVERAL = re.compile(r"refs/(?:pr/\d+|convert/[\w.-]+)(?=/|$)")
"""Revisions of the hub that contain slashes."""


class Access(NamedTuple):
    """Query string and credentials of a request. authorization: the value of the header, or None."""

    query: str = ""
    authorization: str | None = None


_given: dict[tuple[str, ...], Access] = {}
_lock = threading.Lock()


def parse(text: str) -> tuple[list[str], bool]:
    """Return the parts of a RemotePath, and whether the URL has other credentials than before.

    Raises InputError for an invalid URL; the message contains no credentials.
    """
    scheme, _, rest = text.partition("://")
    scheme = scheme.lower()
    if not rest.isprintable() or any(c in rest for c in " \\"):
        raise InputError("invalid URL: it contains spaces or control characters", file=f"{scheme}://…")
    if scheme in ("http", "https"):
        return _web(text)
    if scheme == "hf":
        return _hub(rest), False
    if "@" in rest.partition("/")[0]:
        raise InputError(
            "invalid URL: credentials do not belong into it",
            file=f"{scheme}://…",
            hint="use the environment variables or files of that service",
        )
    return [f"{scheme}:", *_parts(f"{scheme}://{rest}", rest)], False


def _parts(shown: str, rest: str) -> list[str]:
    parts = rest.rstrip("/").split("/")
    if not all(part and part not in (".", "..") for part in parts):
        raise InputError("invalid URL: empty, '.' or '..' part", file=shown)
    return parts


def _web(text: str) -> tuple[list[str], bool]:
    try:
        url = urlsplit(text)
        host, port = url.hostname, url.port
    except ValueError:
        raise InputError("invalid URL", file=f"{text.partition('://')[0].lower()}://…") from None
    scheme = url.scheme.lower()
    if not host:
        raise InputError("invalid URL: no host", file=f"{scheme}://…")
    place = (f"[{host}]" if ":" in host else host) + (f":{port}" if port is not None else "")
    parts = [f"{scheme}:", *_parts(f"{scheme}://{place}{url.path}", place + url.path)]
    access = Access(url.query)
    if url.username is not None:
        pair = f"{unquote(url.username)}:{unquote(url.password or '')}"
        access = Access(url.query, "Basic " + base64.b64encode(pair.encode()).decode())
    return parts, access != Access() and _remember(tuple(parts), access)


def _remember(parts: tuple[str, ...], access: Access) -> bool:
    """Keep the credentials of a file. Returns True if they differ from its earlier ones."""
    with _lock:
        before = _given.get(parts)
        _given[parts] = access
        _given.setdefault(parts[:-1], access)
    return before not in (None, access)


def access_of(parts: tuple[str, ...]) -> Access:
    """Return the query string and the credentials for a file: its own, or those of another file of its folder."""
    return _given.get(parts) or _given.get(parts[:-1]) or Access()


def _hub(rest: str) -> list[str]:
    """hf://org/name[@revision][/file]: the slashes inside a revision become %2F, so that it is one part."""
    shown = f"hf://{rest}"
    if not re.fullmatch(r"[\w.-]+/[\w.-]+(@.*|/.*)?", rest):
        raise InputError("invalid URL", file=shown, expected="hf://org/name[@revision][/file]")
    org, _, name = rest.partition("/")
    if org in ("datasets", "spaces"):
        raise InputError("only model repositories hold weights", file=shown, expected="hf://org/name")
    name, at, after = name.partition("@") if "@" in name.partition("/")[0] else (name, "", "")
    if at:
        several = _SEVERAL.match(after)
        revision = several[0] if several else after.partition("/")[0]
        if not revision:
            raise InputError("invalid URL: empty revision", file=shown, expected="hf://org/name[@revision][/file]")
        name += f"@{quote(unquote(revision), safe='')}{after[len(revision) :]}"
    return ["hf:", *_parts(shown, f"{org}/{name}")]
