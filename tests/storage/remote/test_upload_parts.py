"""Parts of an upload: planned from the layout, equal to the file for any order of the writes."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest

from polyquant.storage.remote import upload_parts
from polyquant.storage.remote.upload_parts import Assembler, FileParts, part_bytes
from polyquant.types import FilePlan

MIB = 1 << 20


@pytest.mark.parametrize(
    ("size", "part"),
    [
        (0, 8 * MIB),
        (8 * MIB, 8 * MIB),
        (72_000 * MIB, 8 * MIB),
        (72_000 * MIB + 1, 9 * MIB),
        (1 << 40, 117 * MIB),
        (5 << 40, 583 * MIB),
    ],
)
def test_part_bytes(size, part):
    assert part_bytes(size) == part
    assert part % MIB == 0
    assert -(-size // part) <= 9000


class Uploaded:
    """Takes parts; counts those in flight. slow: seconds, or a function that may raise."""

    def __init__(self, act=lambda key: None) -> None:
        self.parts, self.twice, self.most, self._now, self._lock = {}, [], 0, 0, threading.Lock()
        self._act = act

    def __call__(self, key, data) -> None:
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)
        self._act(key)
        with self._lock:
            self._now -= 1
            if key in self.parts:
                self.twice.append(key)
            self.parts[key] = bytes(data)


def random_file(rng: np.random.Generator, index: int) -> tuple[FilePlan, bytes, list[tuple[int, int]]]:
    """A file with header pieces, payload and padding: its plan, its bytes, the spans of its payload."""
    size = int(rng.integers(1, 9000))
    cuts = sorted({0, size, *rng.integers(0, size + 1, rng.integers(1, 12)).tolist()})
    data, pieces, spans = bytearray(size), [], []
    for start, stop in pairwise(cuts):
        kind = int(rng.integers(3))
        if kind:
            data[start:stop] = rng.bytes(stop - start)
            (pieces if kind == 1 else spans).append((start, stop))
    plan = FilePlan(str(index), size, tuple((a, bytes(data[a:b])) for a, b in pieces))
    return plan, bytes(data), spans


@pytest.mark.parametrize("seed", range(25))
def test_parts_equal_the_file_in_any_order(seed, tmp_path, monkeypatch):
    monkeypatch.setattr(upload_parts, "_LEAST", 1000)
    monkeypatch.setattr(upload_parts, "_MIB", 1)
    rng = np.random.default_rng(seed)
    made = [random_file(rng, i) for i in range(3)]
    files = [FileParts(plan, spans) for plan, _, spans in made]
    stored = {
        (i, number)
        for i, file in enumerate(files)
        for number in range(1, file.count + 1)
        if file.streams and rng.random() < 0.3
    }
    writes = []
    for i, (_, _, spans) in enumerate(made):
        for start, stop in spans:
            cuts = sorted({start, stop, *rng.integers(start, stop + 1, 4).tolist()})
            writes += [(i, a, b) for a, b in pairwise(cuts)]
    writes += [writes[k] for k in rng.integers(0, len(writes), 5)] if writes else []  # some bytes twice
    rng.shuffle(writes)
    uploaded = Uploaded()
    assembler = Assembler(files, uploaded, budget=int(rng.integers(0, 4000)), spool=tmp_path)
    assembler.start(stored)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda w: assembler.write(int(w[0]), int(w[1]), memoryview(made[w[0]][1])[w[1] : w[2]]), writes))
    assembler.settle()
    assembler.close()
    wanted = {
        (i, number): made[i][1][slice(*file.span(number))]
        for i, file in enumerate(files)
        for number in range(1, file.count + 1)
        if file.streams and (i, number) not in stored
    }
    assert uploaded.parts == wanted
    assert uploaded.twice == []
    assert list(tmp_path.iterdir()) == []


def one_file(count: int, size: int, monkeypatch) -> FileParts:
    monkeypatch.setattr(upload_parts, "_LEAST", size)
    monkeypatch.setattr(upload_parts, "_MIB", 1)
    return FileParts(FilePlan("f", count * size, ()), [(0, count * size)])


def test_write_waits_while_uploads_are_slow(tmp_path, monkeypatch):
    file = one_file(10, 100, monkeypatch)
    go, begun = threading.Event(), []

    def act(key):
        begun.append(key)
        assert go.wait(20)

    assembler = Assembler([file], Uploaded(act), budget=300, spool=tmp_path)
    assembler.start(())
    written = []

    def work():
        for at in range(0, 1000, 100):
            assembler.write(0, at, memoryview(bytes(100)))
            written.append(at)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(0.3)
    assert written == [0, 100, 200]
    go.set()
    thread.join(20)
    assembler.settle()
    assembler.close()
    assert len(begun) == 10


def test_the_error_of_an_upload_ends_the_writes(tmp_path, monkeypatch):
    file = one_file(10, 100, monkeypatch)

    def fail(key):
        raise OSError("gone")

    uploaded = Uploaded(fail)
    assembler = Assembler([file], uploaded, budget=200, spool=tmp_path)
    assembler.start(())
    with pytest.raises(OSError, match="gone"):
        for at in range(0, 1000, 50):
            assembler.write(0, at, memoryview(bytes(50)))
    with pytest.raises(OSError, match="gone"):
        assembler.settle()
    assembler.close()
    assert uploaded.parts == {}


def test_a_part_of_a_thousand_tensors(tmp_path, monkeypatch):
    file = one_file(2, 8000, monkeypatch)
    data = random.Random(5).randbytes(16_000)
    spans = [(a, a + 16) for a in range(0, 16_000, 16)]
    random.Random(6).shuffle(spans)
    uploaded = Uploaded()
    assembler = Assembler([file], uploaded, budget=16_000, spool=tmp_path)
    assembler.start(())
    for a, b in spans:
        assembler.write(0, a, memoryview(data)[a:b])
    assembler.settle()
    assembler.close()
    assert uploaded.parts[0, 1] + uploaded.parts[0, 2] == data
