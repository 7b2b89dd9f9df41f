"""Read-ahead: equal bytes in any order of reads, few requests, a bounded window, conversions from a URL."""

from __future__ import annotations

import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import polyquant as pq
from polyquant.conversion.read_ahead import window_bytes
from polyquant.errors import PlanError, RemoteError
from polyquant.storage.remote import read_ahead, retry
from polyquant.storage.source import Source, fetching
from remote_server import Server, faults, running

SIZE = 24_000_000


@pytest.fixture(scope="module")
def content(tmp_path_factory):
    path = tmp_path_factory.mktemp("ahead") / "data"
    path.write_bytes(np.random.default_rng(2).bytes(SIZE))
    return path


@pytest.fixture
def server(content):
    with running(Server({"/d": content, "/e": content})) as made:
        yield made


def spans_of(source: Source, sizes: list[int], at: int = 1_000_000) -> list[tuple[Source, int, int]]:
    out = []
    for n in sizes:
        out.append((source, at, n))
        at += n
    return out


def test_neighbouring_spans_are_few_requests(server, content):
    source, data = Source(f"{server.url}/d"), content.read_bytes()
    spans = spans_of(source, [8_000, 900_000, 16_000, 64] * 20)
    before = len(server.requests)
    with fetching(spans, 16 << 20):
        for _, at, n in spans:
            assert source.view(at, n).tobytes() == data[at : at + n]
    total = sum(n for *_, n in spans)
    assert len(server.requests) - before <= total // (2 << 20) + 2
    asked = [re.fullmatch(r"bytes=(\d+)-(\d+)", r.range) for r in server.requests[before:]]
    assert sum(int(m[2]) - int(m[1]) + 1 for m in asked) == total


@pytest.mark.parametrize("order", ["reversed", "shuffled", "twice", "offset", "half"])
def test_any_order_of_reads_gives_the_same_bytes(server, content, order):
    source, data = Source(f"{server.url}/d"), content.read_bytes()
    spans = spans_of(source, [700_000, 10, 300_000] * 10)
    reads = [(at, n) for _, at, n in spans]
    rng = np.random.default_rng(3)
    reads = {
        "reversed": reads[::-1],
        "shuffled": [reads[i] for i in rng.permutation(len(reads))],
        "twice": [r for r in reads for _ in range(2)],
        "offset": [(at - 900_000, n + 12_345) for at, n in reads],
        "half": [(at + n // 3, n // 2) for at, n in reads],
    }[order]
    with fetching(spans, 4 << 20):
        for at, n in reads:
            assert source.view(at, n).tobytes() == data[at : at + n]


def test_several_threads_and_files(server, content):
    sources, data = [Source(f"{server.url}/{name}") for name in "de"], content.read_bytes()
    spans = [s for pair in zip(*(spans_of(x, [333_333] * 60) for x in sources), strict=True) for s in pair]

    def read(span):
        source, at, n = span
        return source.view(at, n).tobytes() == data[at : at + n]

    with fetching(spans, 8 << 20), ThreadPoolExecutor(4) as pool:
        assert all(pool.map(read, spans))


def test_the_window_bounds_memory(server, monkeypatch):
    source = Source(f"{server.url}/d")
    held, most, lock = [0], [0], threading.Lock()
    original, drop = read_ahead._ReadAhead._fetch, read_ahead._ReadAhead._drop

    def fetch(self, piece):
        with lock:
            held[0] += piece.stop - piece.start
            most[0] = max(most[0], held[0])
        original(self, piece)

    def dropped(self, piece):
        with lock:
            held[0] -= len(piece.data)
        drop(self, piece)

    monkeypatch.setattr(read_ahead._ReadAhead, "_fetch", fetch)
    monkeypatch.setattr(read_ahead._ReadAhead, "_drop", dropped)
    spans = spans_of(source, [1_000_000] * 20)
    with fetching(spans, 6 << 20):
        time.sleep(0.2)  # a slow reader does not make the window grow
        for _, at, n in spans:
            source.view(at, n)
    assert 3 << 20 < most[0] <= 6 << 20


def test_errors_reach_the_reader(server, monkeypatch):
    source = Source(f"{server.url}/d")
    monkeypatch.setattr(retry, "ATTEMPTS", 2)
    server.fault = lambda request, number: "503"
    spans = spans_of(source, [1_000_000] * 4)
    with fetching(spans, 8 << 20), pytest.raises(RemoteError, match="503"):
        source.view(1_000_000, 1_000_000)


def test_faults_do_not_change_bytes(server, content):
    source, data = Source(f"{server.url}/d"), content.read_bytes()
    server.fault = faults(0.2, ("500", "reset", "truncate", "throttle", "longer"), 5)
    spans = spans_of(source, [500_000] * 40)
    with fetching(spans, 4 << 20):
        for _, at, n in spans:
            assert source.view(at, n).tobytes() == data[at : at + n]


def test_nothing_is_kept_afterwards(server):
    source = Source(f"{server.url}/d")
    with fetching(spans_of(source, [1_000_000] * 8), 64 << 20):
        source.view(1_000_000, 10)
    assert source.ranges.ahead is None
    assert source.view(2_000_000, 10).nbytes == 10


# ---------------------------------------------------------------- conversions


def write_model(path: Path) -> Path:
    """A GGUF file of 30 MB."""
    rng = np.random.default_rng(4)
    tensors = {
        f"blk.{i}.{name}.weight": rng.standard_normal(shape, np.float32)
        for i in range(6)
        for name, shape in (("attn_norm", (1024,)), ("ffn_up", (1024, 1024)), ("attn_q", (256, 1024)))
    }
    pq.save(tensors, path, metadata={"general.architecture": "other"}, codec="f32")
    return path


def test_a_conversion_streams_from_a_url(tmp_path):
    model = write_model(tmp_path / "model.gguf")
    options = {"codec": "q8_0", "allow_unknown": True}
    pq.convert(model, tmp_path / "a.gguf", **options)
    with running(Server({"/model.gguf": model})) as server:
        url = f"{server.url}/model.gguf"
        before = pq.plan(url, "gguf", **options)
        assert window_bytes(before.source) == 64 << 20
        server.requests.clear()
        pq.convert(url, tmp_path / "b.gguf", **options)
        assert server.sent < 1.2 * model.stat().st_size
        assert len(server.requests) < 20  # 30 MB, in pieces of 4 MB
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.gguf", "b.gguf", "model.gguf"]


def test_the_memory_limit_includes_the_window(tmp_path):
    model = write_model(tmp_path / "model.gguf")
    options = {"codec": "q8_0", "allow_unknown": True}
    with running(Server({"/model.gguf": model})) as server:
        plan = pq.plan(f"{server.url}/model.gguf", "gguf", **options)
        assert window_bytes(plan.source, 150_000_000) == 25_000_000
        with pytest.raises(PlanError, match="memory limit is too small"):
            pq.convert(plan, tmp_path / "c.gguf", max_memory="20MB")
        pq.convert(plan, tmp_path / "c.gguf", max_memory="4GB")
    assert window_bytes(pq.open(model)) == 0


def test_a_source_that_changes_meanwhile_is_refused(tmp_path):
    model = write_model(tmp_path / "model.gguf")
    with running(Server({"/model.gguf": model})) as server:
        plan = pq.plan(f"{server.url}/model.gguf", "gguf", codec="q8_0", allow_unknown=True)
        model.write_bytes(model.read_bytes())
        with pytest.raises(pq.InputError, match="changed while it was read"):
            pq.convert(plan, tmp_path / "c.gguf")
    assert not (tmp_path / "c.gguf").exists()
