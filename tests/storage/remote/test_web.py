"""https:// (http:// on this machine): ranges, redirects, credentials, faults, hostile servers."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import polyquant as pq
from polyquant.errors import InputError, PlanError, RemoteError
from polyquant.storage.locations import RemotePath, is_remote, located, shown_path
from polyquant.storage.remote import http, ranges, retry
from polyquant.storage.source import Source
from remote_server import Server, faults, running

GGUF = Path(__file__).parents[2] / "vectors" / "bitnet_gguf" / "tiny-bitnet-b158-tl2.gguf"


@pytest.fixture
def server():
    with running(Server({"/m.gguf": GGUF})) as made:
        yield made


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "data"
    path.write_bytes(np.random.default_rng(1).bytes(3_000_000))
    return path


def test_a_gguf_file_is_inspected_with_one_request(server):
    seen, local = pq.inspect(f"{server.url}/m.gguf"), pq.inspect(GGUF)
    assert [str(w) for w in seen.tensors] == [str(w) for w in local.tensors]
    assert dict(seen.metadata) == dict(local.metadata)
    assert len(server.requests) == 1


def test_the_weights_are_those_of_the_local_file(server):
    remote, local = pq.open(f"{server.url}/m.gguf"), pq.open(GGUF)
    for name in ("token_embd.weight", "output_norm.weight"):
        np.testing.assert_array_equal(remote[name].dequantize(), local[name].dequantize())
        assert all(x.tobytes() == remote[name].read()[p].tobytes() for p, x in local[name].read().items())


def test_reads_are_those_of_the_file(server, data):
    server.files["/d"] = data
    content = data.read_bytes()
    source = Source(f"{server.url}/d")
    assert source.size == len(content)
    for offset, n in ((0, 10), (ranges.FIRST - 3, 10), (2_000_000, 900_000), (len(content) - 1, 1), (5, 0)):
        assert source.pread(offset, n).tobytes() == content[offset : offset + n]
        assert source.view(offset, n).tobytes() == content[offset : offset + n]
    assert source.start(600_000)[:600_000].tobytes() == content[:600_000]
    with pytest.raises(InputError, match="too short"):
        source.pread(len(content) - 1, 2)
    with located(f"{server.url}/d").open("rb") as f:
        assert f.read() == content
        assert f.seek(-5, os.SEEK_END) == len(content) - 5
        assert f.read(10) == content[-5:]


def test_fetched_bytes_are_not_fetched_again(server, data):
    server.files["/d"] = data
    source = Source(f"{server.url}/d")
    source.start(500_000)
    source.pread(2_900_000, 100)
    before = len(server.requests)
    again = Source(f"{server.url}/d")
    again.start(500_000)
    again.pread(2_900_000, 100)
    assert len(server.requests) == before


def test_an_empty_file(server, tmp_path):
    (tmp_path / "empty").touch()
    server.files["/empty"] = tmp_path / "empty"
    assert Source(f"{server.url}/empty").size == 0


@pytest.mark.parametrize("kind", ["500", "503", "throttle", "reset", "truncate", "longer", "lie", "408"])
def test_a_fault_is_repeated(server, data, kind):
    server.files["/d"] = data
    server.fault = lambda request, number: kind if number in (1, 2, 4) else None
    source = Source(f"{server.url}/d")
    assert source.view(2_000_000, 800_000).tobytes() == data.read_bytes()[2_000_000:2_800_000]
    assert len(server.requests) == 5


def test_one_request_in_twenty_fails(server, data):
    server.files["/d"] = data
    server.fault = faults(0.05, ("500", "reset", "truncate", "throttle", "503"), 7)
    content, source = data.read_bytes(), Source(f"{server.url}/d")
    for at in range(0, 2_900_000, 10_000):
        assert source.view(at, 20_000).tobytes() == content[at : at + 20_000]


def test_a_lasting_fault_is_one_line(server):
    server.fault = lambda request, number: "503"
    with pytest.raises(RemoteError, match=r"answers 503 .*\(7 attempts\).*check the network") as caught:
        pq.inspect(f"{server.url}/m.gguf")
    assert "\n" not in str(caught.value)
    server.fault = lambda request, number: "long throttle"
    with pytest.raises(RemoteError, match="asks to try again in 86400 s"):
        pq.inspect(f"{server.url}/m.gguf")


@pytest.mark.parametrize(
    ("status", "error", "message"),
    [
        ("401", RemoteError, "access is denied.*status 401.*user name and password"),
        ("403", RemoteError, "access is denied.*status 403.*may have expired"),
        ("404", InputError, "does not exist on the server.*check the address"),
        ("400", RemoteError, "cannot be read.*status 400"),
    ],
)
def test_a_refusal_has_a_hint(server, status, error, message):
    server.fault = lambda request, number: status
    with pytest.raises(error, match=message):
        pq.inspect(f"{server.url}/m.gguf")
    assert len(server.requests) == 1


def test_a_server_that_ignores_ranges_is_abandoned_before_its_body(server, data):
    server.files["/d"] = data
    os.truncate(data, 1 << 30)
    server.fault = lambda request, number: "whole"
    with pytest.raises(RemoteError, match=r"does not support ranges.*download the file"):
        Source(f"{server.url}/d")
    assert server.sent < 1 << 27  # the buffers of the sockets


@pytest.fixture
def _impatient(monkeypatch):
    monkeypatch.setattr(http, "PATIENCE", 0.3)
    monkeypatch.setattr(http, "SLOWEST", 10_000_000)
    monkeypatch.setattr(retry, "ATTEMPTS", 2)


@pytest.mark.usefixtures("_impatient")
@pytest.mark.parametrize("kind", ["slow", "slow headers"])
def test_a_slow_server_is_abandoned(server, kind):
    server.fault = lambda request, number: kind
    with pytest.raises(RemoteError, match=r"too slow \(2 attempts\)"):
        pq.inspect(f"{server.url}/m.gguf")


def test_nothing_is_read_after_the_range(server, data):
    server.files["/d"] = data
    server.fault = lambda request, number: "endless"
    source = Source(f"{server.url}/d")
    assert source.view(1_000_000, 1000).tobytes() == data.read_bytes()[1_000_000:1_001_000]


def test_another_range_is_refused(server, data):
    server.files["/d"] = data
    source = Source(f"{server.url}/d")
    server.fault = lambda request, number: "other range"
    with pytest.raises(InputError, match="changed while"):  # its size differs too
        source.view(1_000_000, 10)
    server.fault = lambda request, number: "other size"
    with pytest.raises(InputError, match="changed while"):
        source.view(1_000_000, 10)


def test_a_file_that_changes_is_refused(server, data):
    server.files["/d"] = data
    source = Source(f"{server.url}/d")
    data.write_bytes(bytes(3_000_000))
    with pytest.raises(InputError, match="changed while it was read"):
        source.view(1_000_000, 10)
    assert server.requests[-1].status == 412
    assert "If-Match" in server.requests[-1].headers


# ---------------------------------------------------------------- redirects and credentials


def test_redirects_are_followed_without_credentials(server):
    with running(Server({"/there": GGUF})) as other:
        server.user = "me:pass word"
        server.fault = lambda request, number: f"redirect {other.url}/there?{'sig=1'}"
        host = server.url.removeprefix("http://")
        pq.open(f"http://me:pass%20word@{host}/m.gguf")
        assert "Authorization" in server.requests[0].headers
        assert "Authorization" not in other.requests[0].headers
        assert other.requests[0].query == "sig=1"


def test_the_target_of_a_redirect_is_used_again_until_it_refuses(server, data):
    with running(Server({"/there": data})) as other:
        server.fault = lambda request, number: f"redirect {other.url}/there"
        source = Source(f"{server.url}/d")
        source.view(1_000_000, 10)
        assert (len(server.requests), len(other.requests)) == (1, 2)
        other.fault = lambda request, number: "403" if number == 3 else None
        source.view(2_000_000, 10)
        assert (len(server.requests), len(other.requests)) == (2, 4)


def test_bad_redirects(server):
    server.fault = lambda request, number: f"redirect {server.url}/m.gguf"
    with pytest.raises(RemoteError, match="too many redirects"):
        pq.inspect(f"{server.url}/m.gguf")
    for place in ("file:///etc/passwd", "ftp://x/y", "http://[bad/"):
        server.fault = lambda request, number, place=place: f"redirect {place}"
        with pytest.raises(RemoteError, match="redirects to an invalid address"):
            pq.inspect(f"{server.url}/m.gguf")
    resource = http.Resource(located("https://host/x"), "https://host/x")
    answer = SimpleNamespace(headers={"Location": "http://host/x"})
    with pytest.raises(RemoteError, match="from https to http"):
        http._next(resource, "https://host/x", answer)


SECRETS = ("hunter2", "TOPSECRET")


def test_credentials_are_never_shown(server, capsys, monkeypatch):
    from polyquant.cli import main

    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    host = server.url.removeprefix("http://")
    url = f"http://me:hunter2@{host}/m.gguf?sig=TOPSECRET"
    server.user = "me:hunter2"
    shown = [repr(pq.inspect(url)), str(pq.inspect(url).to_json()), repr(pq.open(url)), shown_path(url)]
    main(["inspect", url])
    main(["inspect", url, "--format", "json"])
    server.user = "someone:else"
    ranges.forget(lambda key: True)
    for call in (lambda: pq.inspect(url), lambda: pq.convert(url, "/nonexistent/x.gguf"), lambda: pq.open(url, tile=1)):
        with pytest.raises(Exception) as caught:
            call()
        shown.append(str(caught.value))
    for args in (["inspect"], ["validate"], ["validate", "--format", "sarif"], ["compare", str(GGUF)]):
        with pytest.raises(SystemExit):
            main([*args, url])
    out, err = capsys.readouterr()
    text = "".join((*shown, out, err))
    assert "access is denied" in err
    assert not any(secret in text for secret in SECRETS), text
    assert server.requests[0].query == "sig=TOPSECRET"


def test_credentials_are_not_sent_over_http():
    with pytest.raises(RemoteError, match=r"credentials are not sent over http.*use https"):
        pq.inspect("http://me:hunter2@example.invalid/m.gguf")


def test_files_next_to_it_share_the_query(server):
    pq.open(f"{server.url}/m.gguf?sig=1")
    beside = located(f"{server.url}/m.gguf").with_name("n.gguf")
    with pytest.raises(InputError, match="does not exist"):
        Source(beside)
    assert server.requests[-1].query == "sig=1"


def test_no_server():
    with pytest.raises(RemoteError, match="the connection failed"):
        pq.inspect("http://127.0.0.1:9/m.gguf")


# ---------------------------------------------------------------- paths


def test_a_url_is_a_path():
    path = located("https://user:pw@Host.org:81/a/b/model.gguf?x=1#y")
    assert isinstance(path, RemotePath)
    assert str(path) == os.fspath(path) == "https://host.org:81/a/b/model.gguf"
    assert (path / "x").relative_to(path.parent).as_posix() == "model.gguf/x"
    assert (path / "x").is_relative_to(path)
    assert (path.name, path.suffix, path.stem) == ("model.gguf", ".gguf", "model")
    assert str(path.parent / "x") == "https://host.org:81/a/b/x"
    assert str(path.with_name("y")) == "https://host.org:81/a/b/y"
    assert path.absolute() is path.resolve() is path
    assert isinstance(path.parent, RemotePath)
    assert located(path) is path
    assert located(str(path)) == path
    assert is_remote("s3://bucket/key")
    assert not is_remote("a/b")
    assert located("file:///tmp/a%20b") == Path("/tmp/a b")
    assert type(located("a:b")) is type(Path("a"))


@pytest.mark.parametrize(
    "url",
    ["https:///x", "https://host/a/../b", "https://host//b", "https://h:port/x", "https://h/a b", "hf://org", "hf://a/b@",
     "hf://datasets/a/b", "s3://key:hunter2@bucket/x", "https://h/\x1b[31m", "https://[x/hunter2"],
)  # fmt: skip
def test_invalid_urls(url):
    with pytest.raises(InputError) as caught:
        located(url)
    assert "hunter2" not in str(caught.value)
    assert "\x1b" not in str(caught.value)


def test_a_url_is_not_a_target(tmp_path):
    for call in (pq.convert, pq.quantize):
        with pytest.raises(PlanError, match="a web server is only read"):
            call(GGUF, "https://host/x.gguf", to="gguf")


def test_a_whole_check_and_checksums_of_a_file(server):
    url = f"{server.url}/m.gguf"
    assert pq.validate(url) == pq.validate(GGUF)
    remote, local = (pq.checksum(place).tensors for place in (url, GGUF))
    assert {n: t.content for n, t in remote.items()} == {n: t.content for n, t in local.items()}
