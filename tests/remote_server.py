"""A local web server with ranges, the API of a model hub, counters, and faults on request."""

from __future__ import annotations

import base64
import hashlib
import json
import random
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SIGNATURE = "sig=TOPSECRET"


@dataclass
class Request:
    path: str
    query: str
    range: str | None
    headers: dict[str, str]
    status: int = 0
    sent: int = 0
    began: float = field(default_factory=time.monotonic)
    ended: float = 0.0


@dataclass
class Server:
    """files: URL path -> file. repos: "org/name" -> folder, served as a hub repository.

    fault: called with each request and its number; the name of a fault, or None. large: files from this size redirect
    to `storage`, another server, as on the hub. token: required for the repositories. git: listings have the hashes of
    the content, as on the hub, for uploads to `new_repos`.
    """

    files: dict[str, Path] = field(default_factory=dict)
    repos: dict[str, Path] = field(default_factory=dict)
    fault: Callable[[Request, int], str | None] = lambda request, number: None
    storage: Server | None = None
    large: int = 1 << 62
    token: str | None = None
    user: str | None = None
    listing: Callable[[list[dict]], list[dict]] = lambda siblings: siblings
    requests: list[Request] = field(default_factory=list)
    url: str = ""
    delay: float = 0.0
    new_repos: Path = Path("/nonexistent")
    created: list[dict] = field(default_factory=list)
    commits: list[list[dict]] = field(default_factory=list)
    git: bool = False

    @property
    def sent(self) -> int:
        """Bytes of all bodies."""
        return sum(r.sent for r in self.requests)


def faults(rate: float, kinds: tuple[str, ...], seed: int) -> Callable[[Request, int], str | None]:
    """A share of the requests fails, each in one of these ways."""
    rng = random.Random(seed)
    return lambda request, number: rng.choice(kinds) if rng.random() < rate else None


@contextmanager
def running(server: Server) -> Iterator[Server]:
    class Handler(_Handler):
        state = server

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request, address):  # a client that hangs up is part of the tests
            return

    http = Quiet(("127.0.0.1", 0), Handler)
    server.url = f"http://127.0.0.1:{http.server_port}"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join()


def tag_of(path: Path) -> str:
    """An ETag that changes with the file."""
    status = path.stat()
    return f'"{hashlib.sha256(f"{path}{status.st_size}{status.st_mtime_ns}".encode()).hexdigest()[:32]}"'


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    state: Server

    def log_message(self, *args):
        return

    def do_GET(self):
        try:
            self._get()
        finally:
            self.request_.ended = time.monotonic()

    def do_POST(self):
        """The upload API: repositories are created, files committed at once."""
        split = urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.request_ = Request(unquote(split.path), split.query, None, dict(self.headers))
        self.state.requests.append(self.request_)
        if not self._allowed(self.request_) or self._faulty(self.request_):
            return
        if split.path == "/api/repos/create":
            fields = json.loads(body)
            name = f"{fields['organization']}/{fields['name']}" if fields.get("organization") else fields["name"]
            self.state.created.append(fields)
            status = 409 if name in self.state.repos else 200
            if status == 200:
                self.state.repos[name] = self.state.new_repos / name
                self.state.repos[name].mkdir(parents=True)
            self._json(status, {"url": f"{self.state.url}/{name}"})
            return
        if split.path == "/api/validate-yaml":
            self._json(200, {"errors": [], "warnings": []})
            return
        match = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(preupload|commit)/([^/]+)", split.path)
        if match is None or match[1] not in self.state.repos:
            self._status(404)
        elif match[2] == "preupload":
            paths = [f["path"] for f in json.loads(body)["files"]]
            modes = [{"path": p, "uploadMode": "regular", "shouldIgnore": False} for p in paths]
            self._json(200, {"files": modes})
        else:
            self._commit(match[1], [json.loads(line) for line in body.splitlines()])

    def _commit(self, repo: str, lines: list[dict]) -> None:
        if lines[0]["value"].get("parentCommit") not in (None, COMMIT):
            self._status(412)
            return
        self.state.commits.append(lines)
        for line in lines[1:]:
            path = self.state.repos[repo] / line["value"]["path"]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(base64.b64decode(line["value"]["content"]))
        self._json(200, {"commitUrl": f"{self.state.url}/{repo}/commit/{COMMIT}", "commitOid": COMMIT})

    def _json(self, status: int, value: object) -> None:
        self._status(status, json.dumps(value).encode(), Content_Type="application/json")

    def _get(self):
        split = urlsplit(self.path)
        request = Request(unquote(split.path), split.query, self.headers.get("Range"), dict(self.headers))
        self.state.requests.append(request)
        self.request_ = request
        time.sleep(self.state.delay)
        if not self._allowed(request) or self._faulty(request):
            return
        if request.path.startswith("/api/models/"):
            self._listing(request.path.removeprefix("/api/models/"))
            return
        if (match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", request.path)) is not None:
            self._resolve(match[1], match[2], match[3])
            return
        self._file(self.state.files.get(request.path))

    def _allowed(self, request: Request) -> bool:
        state, sent = self.state, request.headers.get("Authorization")
        if state.token is not None and sent != f"Bearer {state.token}":
            self._status(401)
            return False
        if state.user is not None and sent != "Basic " + base64.b64encode(state.user.encode()).decode():
            self._status(401)
            return False
        return True

    def _status(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.request_.status = status
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        self.request_.sent += len(body)

    def _listing(self, rest: str) -> None:
        match = re.fullmatch(r"([^/]+/[^/]+)/revision/(.+)", rest)
        folder = self.state.repos.get(match[1]) if match else None
        if folder is None or match[2] not in ("main", "v1", "refs/pr/1", COMMIT):
            self._status(404)
            return
        siblings = []
        for path in sorted(p for p in folder.rglob("*") if p.is_file()):
            size = path.stat().st_size
            tag = _blob(path) if self.state.git else tag_of(path)
            entry = {"rfilename": path.relative_to(folder).as_posix(), "size": size, "blobId": tag}
            if size >= self.state.large:
                entry["lfs"] = {"size": size, "sha256": hashlib.sha256(tag_of(path).encode()).hexdigest()}
            siblings.append(entry)
        answer = {"id": match[1], "sha": COMMIT, "siblings": self.state.listing(siblings)}
        self._status(200, json.dumps(answer).encode())

    def _resolve(self, repo: str, revision: str, name: str) -> None:
        folder = self.state.repos.get(repo)
        path = folder / name if folder is not None else None
        if revision not in (COMMIT, "main") or path is None or not path.is_file():
            self._status(404)
        elif path.stat().st_size >= self.state.large and self.state.storage is not None:
            self.state.storage.files[f"/blobs/{name}"] = path
            self._status(302, Location=f"{self.state.storage.url}/blobs/{name}?{SIGNATURE}")
        else:
            self._file(path)

    def _file(self, path: Path | None) -> None:
        if path is None or not path.is_file():
            self._status(404)
            return
        size, tag = path.stat().st_size, tag_of(path)
        if (wanted := self.headers.get("If-Match")) is not None and wanted != tag:
            self._status(412)
            return
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        start, stop = (int(match[1]), min(int(match[2]) + 1, size)) if match else (0, size)
        if match and start >= size:
            self._status(416, Content_Range=f"bytes */{size}")
            return
        self.request_.status = 206 if match else 200
        self.send_response(self.request_.status)
        if match:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
        self.send_header("Content-Length", str(stop - start))
        self.send_header("ETag", tag)
        self.end_headers()
        self._send(path, start, stop)

    def _send(self, path: Path, start: int, stop: int) -> None:
        with path.open("rb") as f:
            f.seek(start)
            while start < stop:
                piece = f.read(min(1 << 20, stop - start))
                self.wfile.write(piece)
                self.request_.sent += len(piece)
                start += len(piece)

    def _faulty(self, request: Request) -> bool:
        """Answer with a fault. Returns False if there is none."""
        kind = self.state.fault(request, len(self.state.requests))
        if kind is None:
            return False
        path = self.state.files.get(request.path)
        size = path.stat().st_size if path is not None and path.is_file() else 0
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", request.range or "")
        start, stop = (int(match[1]), min(int(match[2]) + 1, size)) if match else (0, size)
        if kind.isdigit():
            self._status(int(kind))
        elif kind == "throttle":
            self._status(429, Retry_After="0")
        elif kind == "long throttle":
            self._status(429, Retry_After="86400")
        elif kind == "reset":
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
        elif kind in ("truncate", "slow", "endless", "lie", "other range", "longer", "other size"):
            self._bad_body(kind, path, start, stop, size)
        elif kind == "whole":
            self.send_response(200)
            self.send_header("Content-Length", str(size))
            self.end_headers()
            self._send(path, 0, size)
        elif kind.startswith("redirect "):
            self._status(302, Location=kind.removeprefix("redirect "))
        elif kind == "slow headers":
            for letter in b"HTTP/1.1 200 OK\r\n" * 50:
                self.connection.sendall(bytes([letter]))
                time.sleep(0.05)
        else:
            raise AssertionError(kind)
        return True

    def _bad_body(self, kind: str, path: Path, start: int, stop: int, size: int) -> None:
        total = size + 1 if kind == "other size" else size
        shift = 1 if kind == "other range" else 0
        length = {"longer": stop - start + 9, "lie": max(0, stop - start - 5)}.get(kind, stop - start)
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {start + shift}-{stop - 1 + shift}/{total + shift}")
        if kind == "endless":
            self.send_header("Connection", "close")
        else:
            self.send_header("Content-Length", str(length))
        self.send_header("ETag", tag_of(path))
        self.end_headers()
        self.close_connection = True
        if kind == "truncate":
            self._send(path, start, start + (stop - start) // 2)
        elif kind == "slow":
            for _ in range(200):
                self.connection.sendall(b"x")
                time.sleep(0.05)
        elif kind == "endless":
            self._send(path, start, stop)
            for _ in range(100_000):
                self.connection.sendall(bytes(1 << 16))
        else:
            self._send(path, start, stop)


def _blob(path: Path) -> str:
    """The id of a git blob."""
    data = path.read_bytes()
    return hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()
