"""s3:// against a local S3 server, with injected faults, and memory:// for every other URL of fsspec."""

from __future__ import annotations

import http.client
import logging
import random
import shutil
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest

import polyquant as pq
from polyquant.errors import InputError, RemoteError, UnsupportedError
from polyquant.storage.locations import located
from polyquant.storage.remote import ranges, retry
from polyquant.storage.source import Source, opened_files, refuse_changed

fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed")

VECTORS = Path(__file__).parents[2] / "vectors"
LLAMA = VECTORS / "models" / "tiny-llama-untied" / "hf"
GGUF = VECTORS / "bitnet_gguf" / "tiny-bitnet-b158-tl2.gguf"


# ---------------------------------------------------------------- memory://


@pytest.fixture
def memory():
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]
    yield fs
    fs.store.clear()


def upload(fs, folder: Path, to: str) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            fs.pipe_file(f"{to}/{path.relative_to(folder).as_posix()}", path.read_bytes())


def test_a_folder_of_any_fsspec_url(memory):
    upload(memory, LLAMA, "/models/llama")
    remote, local = pq.open("memory://models/llama"), pq.open(LLAMA)
    assert list(remote) == list(local)
    assert sorted(remote.files) == sorted(local.files)
    name = next(iter(local))
    np.testing.assert_array_equal(remote[name].dequantize(), local[name].dequantize())
    assert located("memory://models").is_dir()
    assert not located("memory://models/other").exists()


def test_a_missing_object_and_an_unknown_scheme(memory):
    with pytest.raises(InputError, match="does not exist on the server"):
        pq.inspect("memory://models/none.gguf")
    with pytest.raises(UnsupportedError, match="no package opens URLs of this kind"):
        pq.inspect("unheard-of://models/none.gguf")


def test_a_listing_with_hostile_names(memory, monkeypatch):
    upload(memory, LLAMA, "/models/llama")
    original = type(memory).ls
    for name in ("/models/llama/..", "/etc/passwd", "/models/llama/../x", "/models/llama/a\x1b"):

        def listing(self, path, name=name, **options):
            return [*original(self, path, **options), {"name": name, "size": 1, "type": "file"}]

        monkeypatch.setattr(type(memory), "ls", listing)
        with pytest.raises(InputError, match="lists a name that leaves the folder"):
            pq.inspect("memory://models/llama")


def test_short_and_long_answers(memory, monkeypatch):
    memory.pipe_file("/m/d", bytes(1_000_000))
    source = Source("memory://m/d")
    original, calls = type(memory).cat_file, []

    def short(self, path, start=None, end=None, **options):
        calls.append(start)
        return original(self, path, start=start, end=end - 1 if len(calls) < 3 else end, **options)

    monkeypatch.setattr(type(memory), "cat_file", short)
    assert source.view(500_000, 1000).nbytes == 1000
    assert len(calls) == 3
    monkeypatch.setattr(type(memory), "cat_file", lambda self, path, **options: bytes(1_000_000))
    with pytest.raises(RemoteError, match="sends another range"):
        source.view(500_000, 1000)


@pytest.mark.parametrize(
    ("problem", "error", "message"),
    [
        (PermissionError("The provided token has expired. https://h/x?sig=TOPSECRET"), RemoteError,
         "access is denied.*credentials.*may have expired"),
        (TimeoutError("too slow"), RemoteError, r"TimeoutError: too slow \(7 attempts\)"),
        (ConnectionResetError("gone"), RemoteError, r"ConnectionResetError: gone \(7 attempts\)"),
        (FileNotFoundError("x"), InputError, "does not exist"),
        (ImportError("install x to open this"), RemoteError, r"install x.*pip install 'polyquant\[remote\]'"),
        (ValueError("bad"), RemoteError, "cannot be read: ValueError: bad"),
    ],
)  # fmt: skip
def test_an_exception_of_a_package_is_one_line(memory, monkeypatch, problem, error, message):
    memory.pipe_file("/m/d", bytes(1_000_000))

    def fail(self, path, **options):
        raise problem

    monkeypatch.setattr(type(memory), "cat_file", fail)
    with pytest.raises(error, match=message) as caught:
        pq.inspect("memory://m/d")
    assert "TOPSECRET" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_server_that_never_answers_is_given_up_early(memory, monkeypatch):
    """The packages repeat requests for half a minute themselves, and would log a traceback each time."""
    now = [0.0]
    monkeypatch.setattr(retry.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(retry.time, "sleep", lambda seconds: None)
    asked = []

    def unreachable(self, path, **options):
        asked.append(path)
        now[0] += 30
        raise ConnectionError("Cannot connect to host")

    monkeypatch.setattr(type(memory), "info", unreachable)
    with pytest.raises(RemoteError, match="Cannot connect to host"):
        pq.inspect("memory://m/d")
    assert len(asked) == 1
    assert any(isinstance(handler, logging.NullHandler) for handler in logging.getLogger("gcsfs").handlers)


# ---------------------------------------------------------------- s3://


class _Faulty:
    """A proxy in front of the S3 server: counts requests, and lets a share of them fail."""

    def __init__(self, target: str) -> None:
        self.rate, self.requests, self.sent, self._rng = 0.0, [], 0, random.Random(11)
        proxy, place = self, urlsplit(target)

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args):
                return

            def _forward(self):
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                connection = http.client.HTTPConnection(place.hostname, place.port)
                connection.request(self.command, self.path, body, dict(self.headers))
                answer = connection.getresponse()
                data = answer.read()
                kind = proxy._fault(self.command, self.path)
                if kind == "fail":
                    answer.status, data = 503, b"<Error><Code>SlowDown</Code><Message>slow down</Message></Error>"
                self.send_response(answer.status)
                for name, value in answer.headers.items():
                    if name.lower() not in ("connection", "transfer-encoding", "content-length", "date", "server"):
                        self.send_header(name, value)
                length = answer.headers.get("Content-Length") if self.command == "HEAD" else len(data)
                self.send_header("Content-Length", str(length or 0))
                self.end_headers()
                if kind == "truncate" and self.command == "GET":
                    self.close_connection, data = True, data[: len(data) // 2]
                if self.command != "HEAD":
                    self.wfile.write(data)
                    proxy.sent += len(data)
                connection.close()

            do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _forward

        class Quiet(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request, address):
                return

        self.server = Quiet(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def _fault(self, command: str, path: str) -> str | None:
        self.requests.append((command, path))
        return self._rng.choice(("fail", "truncate")) if self._rng.random() < self.rate else None


@contextmanager
def s3_server():
    moto = pytest.importorskip("moto.server", reason="moto[server] is not installed")
    server = moto.ThreadedMotoServer(port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    proxy = _Faulty(f"http://127.0.0.1:{port}")
    try:
        yield proxy
    finally:
        proxy.server.shutdown()
        proxy.server.server_close()
        server.stop()


@pytest.fixture(scope="module")
def s3():
    s3fs = pytest.importorskip("s3fs", reason="s3fs is not installed")
    with pytest.MonkeyPatch.context() as patch, s3_server() as proxy:
        for name, value in {
            "AWS_ENDPOINT_URL": proxy.url, "AWS_ACCESS_KEY_ID": "someone", "AWS_SECRET_ACCESS_KEY": "TOPSECRET",
            "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true", "AWS_MAX_ATTEMPTS": "1",
        }.items():  # fmt: skip
            patch.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()
        fs = fsspec.filesystem("s3")
        fs.mkdir("models")
        upload(fs, LLAMA, "models/llama")
        fs.pipe_file("models/m.gguf", GGUF.read_bytes())
        proxy.fs = fs
        yield proxy
        s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture(autouse=True)
def _no_faults(request):
    yield
    if "s3" in request.fixturenames:
        request.getfixturevalue("s3").rate = 0.0


def test_a_bucket_is_listed_once(s3):
    s3.requests.clear()
    remote, local = pq.open("s3://models/llama"), pq.open(LLAMA)
    assert list(remote) == list(local)
    assert sorted(remote.files) == sorted(local.files)
    listings = [path for command, path in s3.requests if "list-type=2" in path]
    assert len(listings) <= 2  # one for its kind, one for its names
    assert len(s3.requests) < 10


def test_a_conversion_from_s3_with_faults(s3, tmp_path, monkeypatch):
    local = tmp_path / "llama"
    shutil.copytree(LLAMA, local)
    pq.convert(local, tmp_path / "a.gguf", codec="q8_0")
    s3.rate = 0.05
    for seed in range(3):
        s3._rng = random.Random(seed)
        located("s3://models/llama")
        ranges.forget(lambda key: True)
        pq.convert("s3://models/llama", tmp_path / f"{seed}.gguf", codec="q8_0")
        assert (tmp_path / f"{seed}.gguf").read_bytes() == (tmp_path / "a.gguf").read_bytes()


def test_an_object_that_changes_is_refused(s3):
    s3.fs.pipe_file("models/changing", bytes(1_000_000))
    with opened_files() as opened:
        Source("s3://models/changing")
    refuse_changed(opened)
    s3.fs.pipe_file("models/changing", bytes(999_999) + b"x")
    with pytest.raises(InputError, match="changed while it was read"):
        refuse_changed(opened)


def test_refusals_of_s3(s3, monkeypatch):
    with pytest.raises(InputError, match="does not exist"):
        pq.inspect("s3://models/none.gguf")
    with pytest.raises((InputError, RemoteError)):
        pq.inspect("s3://no-such-bucket/none.gguf")
    monkeypatch.setattr(retry, "ATTEMPTS", 2)
    s3.rate = 1.0
    with pytest.raises(RemoteError) as caught:
        pq.inspect("s3://models/m.gguf")
    assert "TOPSECRET" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_headers_of_a_gguf_object(s3):
    s3.requests.clear()
    before = s3.sent
    assert len(pq.inspect("s3://models/m.gguf").tensors) == len(pq.open(GGUF))
    assert len(s3.requests) <= 6
    assert s3.sent - before < 1_000_000
