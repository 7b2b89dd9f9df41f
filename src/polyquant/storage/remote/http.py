"""An HTTP client for byte ranges of untrusted servers.

One request reads one range into memory of a known size. Nothing beyond it is read: a server that ignores the range,
sends another one, sends too much, too little or too slowly gives an error. Redirects are followed, but credentials are
only sent to the host that the user named, and never from https to http. Connections are kept and reused; proxies are
those of the environment.
"""

from __future__ import annotations

import base64
import http.client
import os
import re
import socket
import ssl
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from http.client import HTTPConnection, HTTPResponse, HTTPSConnection
from time import time
from typing import NamedTuple
from urllib.parse import SplitResult, unquote, urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

from polyquant.errors import InputError, RemoteError
from polyquant.storage.file_state import Entry
from polyquant.storage.locations import RemotePath
from polyquant.storage.remote.retry import FailedRequestError, repeated

__all__ = ["Resource", "Whole", "open_range", "read_range", "small_body"]

CONNECT = 10.0
"""Seconds to connect, and for each silence of the server."""
PATIENCE = 20.0
"""Seconds for any answer; `SLOWEST` adds to it."""
SLOWEST = 50_000
"""Bytes per second below which a transfer is abandoned and repeated."""
_HOPS = 6
_IDLE = 16
"""Connections kept per host."""
_MOVED = (301, 302, 303, 307, 308)
_RETRIED = (408, 425, 429)
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
_LOCAL = ("localhost", "127.0.0.1", "::1")


@dataclass(slots=True)
class Resource:
    """A file on a web server. authorization: sent to the host of `url` only; refused: hints by status (401, 403, 404).

    moved: where the last redirect led; used until that server refuses.
    """

    path: RemotePath
    url: str
    authorization: str | None = None
    refused: Mapping[int, str] = field(default_factory=dict)
    moved: str | None = None


class Whole(NamedTuple):
    """The answer to a range request from offset 0: the file's entry, and its first bytes."""

    entry: Entry
    data: bytes


def open_range(resource: Resource, n: int) -> Whole:
    """Read the first n bytes, or all of a smaller file. Raises RemoteError, InputError for a missing file."""

    def attempt() -> Whole:
        with _answer(resource, {"Range": f"bytes=0-{n - 1}"}, n) as response:
            if response.status == 416:  # an empty file has no first byte
                if response.headers.get("Content-Range", "").strip() == "bytes */0":
                    return Whole(_entry(response, 0), b"")
                raise RemoteError("cannot be read: the server refuses a range", file=resource.path, found="status 416")
            if response.status == 200:
                return _whole(resource, response, n)
            first, last, total = _content_range(resource, response)
            if first != 0 or last != min(n, total) - 1:
                raise _wrong_range(resource, f"bytes 0-{n - 1}", response)
            return Whole(_entry(response, total), _body(response, last + 1))

    return repeated(resource.path, attempt)


def read_range(resource: Resource, entry: Entry, start: int, out: memoryview) -> None:
    """Fill `out` from offset `start`. Raises RemoteError; InputError if the file is no longer `entry`."""
    n = len(out)
    if not n:
        return
    headers = {"Range": f"bytes={start}-{start + n - 1}"}
    if entry.tag.startswith('"'):  # a strong ETag
        headers["If-Match"] = entry.tag

    def attempt() -> None:
        with _answer(resource, headers, n) as response:
            if response.status in (412, 416):
                raise _changed(resource)
            if response.status == 200 and not (start == 0 and n == entry.size and response.length == n):
                raise _ignored(resource)
            if response.status != 200:
                first, last, total = _content_range(resource, response)
                if total != entry.size:
                    raise _changed(resource)
                if (first, last) != (start, start + n - 1):
                    raise _wrong_range(resource, headers["Range"].replace("=", " "), response)
            if not _same(_entry(response, entry.size), entry):
                raise _changed(resource)
            _fill(response, out)

    repeated(resource.path, attempt)


def small_body(resource: Resource, limit: int) -> bytes:
    """Read a whole answer of at most `limit` bytes. Raises RemoteError, InputError if there is none."""

    def attempt() -> bytes:
        with _answer(resource, {"Accept": "application/json"}, limit) as response:
            data: bytes = response.read(limit + 1)
            if len(data) > limit:
                raise RemoteError("the answer is too large", file=resource.path, expected=f"at most {limit} bytes")
            if response.length:
                raise FailedRequestError("the connection ended early")
            return data

    return repeated(resource.path, attempt)


# ---------------------------------------------------------------- bodies


def _whole(resource: Resource, response: HTTPResponse, n: int) -> Whole:
    """Accept the whole file instead of a range, if it is not larger than the range."""
    if response.length is not None:
        if response.length > n:
            raise _ignored(resource)
        return Whole(_entry(response, response.length), _body(response, response.length))
    data = response.read(n + 1)  # chunked
    if len(data) > n:
        raise _ignored(resource)
    return Whole(_entry(response, len(data)), data)


def _body(response: HTTPResponse, n: int) -> bytes:
    data = bytearray(n)
    _fill(response, memoryview(data))
    return bytes(data)


def _fill(response: HTTPResponse, out: memoryview) -> None:
    if response.length is not None and response.length != len(out):
        raise FailedRequestError(f"Content-Length is {response.length}, expected {len(out)}")
    done = 0
    while done < len(out):
        got = response.readinto(out[done:])
        if not got:
            raise FailedRequestError(f"the connection ended after {done} of {len(out)} bytes")
        done += got


def _entry(response: HTTPResponse, total: int) -> Entry:
    tag = response.headers.get("ETag", "").strip()
    modified = response.headers.get("Last-Modified", "")
    try:
        seconds = int(parsedate_to_datetime(modified).timestamp()) if modified else 0
    except (ValueError, OverflowError):
        seconds = 0
    return Entry(total, tag, max(0, seconds) * 10**9)


def _same(a: Entry, b: Entry) -> bool:
    return a.tag == b.tag if a.tag and b.tag else a.mtime_ns == b.mtime_ns


def _content_range(resource: Resource, response: HTTPResponse) -> tuple[int, int, int]:
    match = _RANGE.fullmatch(response.headers.get("Content-Range", "").strip()[:100])
    if match is None or not int(match[1]) <= int(match[2]) < int(match[3]) < 1 << 62:
        raise _wrong_range(resource, "a Content-Range", response)
    return int(match[1]), int(match[2]), int(match[3])


def _wrong_range(resource: Resource, expected: str, response: HTTPResponse) -> RemoteError:
    found = response.headers.get("Content-Range", "none")
    return RemoteError("the server sends another range", file=resource.path, expected=expected, found=found)


def _ignored(resource: Resource) -> RemoteError:
    hint = "download the file, then use the local copy"
    return RemoteError("the server does not support ranges", file=resource.path, found="the whole file", hint=hint)


def _changed(resource: Resource) -> InputError:
    return InputError(
        "changed while it was read", file=resource.path, hint="run again when no program is writing to it"
    )


# ---------------------------------------------------------------- requests


@contextmanager
def _answer(resource: Resource, headers: Mapping[str, str], n: int) -> Iterator[HTTPResponse]:
    """Send a GET request, follow redirects and yield an answer of status 200, 206, 412 or 416.

    n: expected bytes, from which the deadline follows. Raises FailedRequestError if a repetition may help.
    """
    watch = _Watch(PATIENCE + n / SLOWEST)
    url, complete = resource.moved or resource.url, False
    try:
        for _ in range(_HOPS):
            response = _send(resource, url, headers, watch)
            if response.status in _MOVED:
                url = _next(resource, url, response)
            elif resource.moved is not None and url == resource.moved and response.status in (401, 403, 404, 410):
                url, resource.moved = resource.url, None  # a signed address has expired
            else:
                break
            watch.drop(reuse=_drained(response))
        else:
            raise RemoteError("too many redirects", file=resource.path)
        _refuse_status(resource, response)
        if response.headers.get("Content-Encoding", "identity").strip().lower() != "identity":
            raise RemoteError("the server sends compressed data, which has no ranges", file=resource.path)
        resource.moved = url if url != resource.url else None
        yield response
        complete = response.isclosed()
    except (OSError, http.client.HTTPException) as problem:
        raise _failure(resource, problem, slow=watch.fired) from None
    except FailedRequestError:
        if watch.fired:
            raise FailedRequestError("the server is too slow") from None
        raise
    finally:
        watch.drop(reuse=complete)
        watch.cancel()


def _send(resource: Resource, url: str, headers: Mapping[str, str], watch: _Watch) -> HTTPResponse:
    split = urlsplit(url)
    fields = {"Accept-Encoding": "identity", "User-Agent": "polyquant", **headers}
    if resource.authorization is not None and _origin(split) == _origin(urlsplit(resource.url)):
        fields["Authorization"] = resource.authorization
    target, proxied = _target(split)
    if proxied is not None:
        fields["Proxy-Authorization"] = proxied
    while True:
        connection, used = _pool.take(split)
        watch.guard(split, connection)
        try:
            connection.request("GET", target, headers=fields)
            return watch.response_of(connection)
        except (http.client.RemoteDisconnected, ConnectionError):
            watch.drop(reuse=False)
            if not used:  # an idle connection that the server has closed is not a failure
                raise


def _next(resource: Resource, url: str, response: HTTPResponse) -> str:
    """Return the target of a redirect. Raises RemoteError for one that must not be followed."""
    try:
        new = urljoin(url, response.headers.get("Location", ""))
        split = urlsplit(new)
        host, _ = split.hostname, split.port
    except ValueError:
        host = None
    if host is None or split.scheme not in ("http", "https") or not new.isprintable() or " " in new:
        raise RemoteError("the server redirects to an invalid address", file=resource.path)
    if split.scheme == "http" and urlsplit(url).scheme == "https":
        raise RemoteError(
            "the server redirects from https to http, which is not followed", file=resource.path, found=host
        )
    return new


def _refuse_status(resource: Resource, response: HTTPResponse) -> None:
    status = response.status
    if status in (200, 206, 412, 416):
        return
    if status in _RETRIED or status >= 500:
        raise FailedRequestError(f"the server answers {status} {response.reason[:60]}", _retry_after(response))
    hint, found = resource.refused.get(status), f"status {status}"
    if status in (404, 410):
        raise InputError("does not exist on the server", file=resource.path, found=found, hint=hint)
    if status in (401, 403, 407):
        raise RemoteError("access is denied", file=resource.path, found=found, hint=hint)
    raise RemoteError("cannot be read", file=resource.path, found=found)


def _retry_after(response: HTTPResponse) -> float | None:
    text = response.headers.get("Retry-After", "").strip()
    if text.isascii() and text.isdigit():
        return float(text[:9])
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time()) if text else None
    except (ValueError, OverflowError):
        return None


def _failure(resource: Resource, problem: Exception, *, slow: bool) -> Exception:
    if slow or isinstance(problem, TimeoutError):
        return FailedRequestError("the server is too slow")
    if isinstance(problem, ssl.SSLCertVerificationError):
        return RemoteError(
            f"the server's certificate is not trusted: {problem.verify_message}",
            file=resource.path,
            hint="SSL_CERT_FILE names additional certificates",
        )
    if isinstance(problem, socket.gaierror) and problem.errno in (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", 0)):
        return RemoteError("no host of that name", file=resource.path, hint="check the address and the network")
    reason = problem.strerror if isinstance(problem, OSError) and problem.strerror else type(problem).__name__
    return FailedRequestError(f"the connection failed: {reason}")


def _drained(response: HTTPResponse) -> bool:
    """Read the short body of a redirect; return True if the connection can be used again."""
    if response.length is None or response.length > 1 << 16:
        return False
    response.read()
    return response.isclosed()


# ---------------------------------------------------------------- connections


def _origin(url: SplitResult) -> tuple[str, str, int]:
    return url.scheme, url.hostname or "", url.port or (443 if url.scheme == "https" else 80)


def _proxy(url: SplitResult) -> SplitResult | None:
    """Return the proxy for a request, from the environment."""
    host = url.hostname or ""
    address = getproxies().get(url.scheme)
    if not address or host in _LOCAL or proxy_bypass(host):
        return None
    return urlsplit(address if "://" in address else f"http://{address}")


def _basic(url: SplitResult) -> str | None:
    if url.username is None:
        return None
    pair = f"{unquote(url.username)}:{unquote(url.password or '')}"
    return "Basic " + base64.b64encode(pair.encode()).decode()


def _target(url: SplitResult) -> tuple[str, str | None]:
    """Return the target of the request line, and the value of Proxy-Authorization or None."""
    path = (url.path or "/") + (f"?{url.query}" if url.query else "")
    proxy = _proxy(url)
    if proxy is None or url.scheme == "https":
        return path, None
    return f"{url.scheme}://{url.netloc.rpartition('@')[2]}{path}", _basic(proxy)


def _connection(url: SplitResult) -> HTTPConnection:
    _, host, port = _origin(url)
    proxy = _proxy(url)
    at, at_port = (host, port) if proxy is None else (proxy.hostname or "", proxy.port or 80)
    if url.scheme == "http":
        return HTTPConnection(at, at_port, timeout=CONNECT)
    made = HTTPSConnection(at, at_port, timeout=CONNECT, context=_trust())
    if proxy is not None:
        value = _basic(proxy)
        made.set_tunnel(host, port, {"Proxy-Authorization": value} if value else {})
    return made


_contexts: list[ssl.SSLContext] = []


def _trust() -> ssl.SSLContext:
    """Return the trusted certificates: the system's, or those of certifi where the system has none."""
    if not _contexts:
        context = ssl.create_default_context()
        if not context.get_ca_certs() and not ssl.get_default_verify_paths().capath:
            try:
                import certifi
            except ImportError:
                pass
            else:
                context.load_verify_locations(certifi.where())
        _contexts.append(context)
    return _contexts[0]


class _Pool:
    """Idle connections by host."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: dict[tuple[str, str, int], list[HTTPConnection]] = {}

    def take(self, url: SplitResult) -> tuple[HTTPConnection, bool]:
        """Return a connection, and whether it was used before."""
        with self._lock:
            idle = self._idle.get(_origin(url))
            if idle:
                return idle.pop(), True
        return _connection(url), False

    def give(self, url: SplitResult, connection: HTTPConnection) -> None:
        """Take back a connection whose answer was read completely."""
        with self._lock:
            idle = self._idle.setdefault(_origin(url), [])
            if len(idle) < _IDLE:
                idle.append(connection)
                return
        connection.close()

    def clear(self) -> None:
        """Forget all connections; after a fork they belong to the parent."""
        self._lock = threading.Lock()
        self._idle = {}


_pool = _Pool()
os.register_at_fork(after_in_child=_pool.clear)


class _Watch:
    """The deadline of a request: it shuts the socket down, which ends every wait for it."""

    def __init__(self, seconds: float) -> None:
        self.fired = False
        self._held: tuple[SplitResult, HTTPConnection] | None = None
        self._response: HTTPResponse | None = None
        self._socket: socket.socket | None = None
        self._timer = threading.Timer(seconds, self._fire)
        self._timer.daemon = True
        self._timer.start()

    def guard(self, url: SplitResult, connection: HTTPConnection) -> None:
        """Watch this connection from now on."""
        self._held, self._response, self._socket = (url, connection), None, None

    def response_of(self, connection: HTTPConnection) -> HTTPResponse:
        """Return the answer to the request that was sent."""
        self._socket = connection.sock  # the connection drops it if the server closes after the answer
        self._response = connection.getresponse()
        return self._response

    def drop(self, *, reuse: bool) -> None:
        """End the use of the connection: keep it for the next request, or close it."""
        held, response, self._held, self._response, self._socket = self._held, self._response, None, None, None
        if held is None:
            return
        if reuse and not self.fired and held[1].sock is not None:
            _pool.give(*held)
            return
        held[1].close()
        if response is not None:
            response.close()

    def cancel(self) -> None:
        """End the watch."""
        self._timer.cancel()

    def _fire(self) -> None:
        self.fired = True
        held = self._held
        sock = self._socket or (held[1].sock if held is not None else None)
        if sock is not None:
            with suppress(OSError):
                socket.socket.shutdown(sock, socket.SHUT_RDWR)  # not SSLSocket's, which another thread is using
