import json
import time
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from folders import raw_safetensors, safetensors_bytes
from golden import VECTORS
from polyquant.errors import InputError
from polyquant.storage.safetensors import DTYPE_BITS, header_bytes, plausible, read_header, survey
from polyquant.storage.source import Source

HUB = ("hub", "hub_readonly")  # cut down, or written by programs that order entries differently
FILES = sorted(p for p in VECTORS.rglob("*.safetensors") if p.relative_to(VECTORS).parts[0] not in HUB)


def header_of(path):
    return read_header(Source(path))


@pytest.fixture
def file(tmp_path):
    def make(data):
        path = tmp_path / "x.safetensors"
        path.write_bytes(data)
        return path

    return make


@pytest.mark.parametrize("path", FILES, ids=lambda p: f"{p.parent.parent.name}-{p.parent.name}")
def test_reads_and_writes_like_the_safetensors_package(path):
    header = header_of(path)
    with safetensors.safe_open(path, "numpy") as peer:
        assert set(peer.keys()) == set(header.entries)
        assert (peer.metadata() or {}) == header.metadata
    raw = path.read_bytes()
    for name, tensor in safetensors.deserialize(raw):
        e = header.entries[name]
        assert (e.dtype, list(e.shape)) == (tensor["dtype"], tensor["shape"])
        assert raw[e.offset : e.offset + e.nbytes] == bytes(tensor["data"])
    start, entries = header_bytes([(e.name, e.dtype, e.shape) for e in header.entries.values()], header.metadata)
    assert raw.startswith(start)
    assert {e.name: e for e in entries} == header.entries


def test_all_dtypes_have_the_offsets_of_the_package(file):
    arrays = {
        f"t{i}": np.arange(6).reshape(2, 3).astype(d)
        for i, d in enumerate(
            ["?", "u1", "i1", "<i2", "<u2", "<f2", ml_dtypes.bfloat16, "<i4", "<u4", "<f4", "<f8", "<i8", "<u8"]
        )
    }
    path = file(safetensors.numpy.save(arrays))
    header = header_of(path)
    start, _ = header_bytes([(e.name, e.dtype, e.shape) for e in header.entries.values()], {})
    assert path.read_bytes().startswith(start)
    raw = path.read_bytes()
    for name, array in arrays.items():
        e = header.entries[name]
        assert raw[e.offset : e.offset + e.nbytes] == array.tobytes()


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


HEADERS = {
    "not an object": ([1], "does not start with {"),
    "entry is a list": ({"a": []}, "wrong type"),
    "no dtype": ({"a": {"shape": [2], "data_offsets": [0, 8]}}, "lacks dtype"),
    "no offsets": ({"a": {"shape": [2], "dtype": "F32"}}, "lacks data_offsets"),
    "dtype is a number": ({"a": entry(dtype=3)}, "dtype has the wrong type"),
    "shape of floats": ({"a": entry(shape=[2.0])}, "shape has the wrong type"),
    "shape of bools": ({"a": entry(shape=[True, 2])}, "shape has the wrong type"),
    "negative shape": ({"a": entry(shape=[-1, -2])}, "too small"),
    "negative offset": ({"a": entry(offsets=[-8, 0])}, "too small"),
    "offsets backwards": ({"a": entry(offsets=[8, 0])}, "data_offsets must be"),
    "three offsets": ({"a": entry(offsets=[0, 8, 8])}, "data_offsets must be"),
    "long name": ({"a" * 65_536: entry()}, "name is too long"),
    "33 dimensions": ({"a": entry(shape=[1] * 33)}, "too many dimensions"),
    "too few bytes": ({"a": entry(shape=[3])}, "does not fit F32"),
    "too many bytes": ({"a": entry(shape=[1])}, "does not fit F32"),
    "10^12 elements": ({"a": entry(shape=[10**12])}, "does not fit F32"),
    "product overflows 64 bits": ({"a": entry(shape=[2**32, 2**32])}, "larger than any file"),
    "product wraps to the right size": ({"a": entry(dtype="U8", shape=[2**40, 2**24 + 1])}, "larger than any file"),
    "empty but vast": ({"a": entry(shape=[0, 2**60], offsets=[0, 0])}, "larger than any file"),
    "unknown dtype, too dense": ({"a": entry(dtype="F1", shape=[65])}, "cannot hold 65"),
    "odd F4": ({"a": entry(dtype="F4", shape=[15])}, "does not fit F4"),
    "hole": ({"a": entry(), "b": entry(offsets=[12, 20])}, "hole"),
    "hole at the start": ({"a": entry(offsets=[4, 12])}, "hole"),
    "overlap": ({"a": entry(), "b": entry(offsets=[4, 12])}, "overlaps"),
    "same bytes twice": ({"a": entry(), "b": entry()}, "overlaps"),
    "past the end": ({"a": entry(shape=[100], offsets=[0, 400])}, "ends after the file"),
    "trailing": ({"a": entry(shape=[1], offsets=[0, 4])}, "after the last tensor"),
    "metadata of numbers": ({"__metadata__": {"a": 1}, "a": entry()}, "__metadata__"),
}  # fmt: skip


@pytest.mark.parametrize("name", HEADERS)
def test_broken_headers_are_refused(name, file):
    header, why = HEADERS[name]
    data = b"" if name in ("not an object",) else bytes(20 if "hole" in name or "overlap" in name else 8)
    path = file(raw_safetensors(json.dumps(header), data))
    with pytest.raises(InputError, match=why) as e:
        header_of(path)
    assert "\n" not in str(e.value)


RAW = {
    "nothing": b"",
    "seven bytes": bytes(7),
    "header of 2^64 - 1": b"\xff" * 8 + b"{}",
    "header over 100 MB": (100_000_001).to_bytes(8, "little") + b"{}",
    "header past the end": (3).to_bytes(8, "little") + b"{}",
    "header of zero": bytes(8),
    "key twice": raw_safetensors(
        '{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'
    ),
    "deep": raw_safetensors('{"a":' * 1000),
    "bad UTF-8": raw_safetensors(b'{"\xff":1}'),
}  # fmt: skip


@pytest.mark.parametrize("name", RAW)
def test_broken_files_are_refused(name, file):
    with pytest.raises(InputError) as e:
        header_of(file(RAW[name]))
    assert "\n" not in str(e.value)


def test_header_over_100_mb_is_refused_at_once(file):
    path = file((100_000_001).to_bytes(8, "little") + b'{"')
    with path.open("r+b") as f:
        f.truncate(10**10)
    assert plausible(Source(path))
    with pytest.raises(InputError, match="header is too large"):
        header_of(path)


def test_a_hostile_header_of_full_size_costs_little(file):
    path = file(raw_safetensors(b'{"a":[' + b"1," * 6_900_000))
    tracemalloc.start()
    try:
        start = time.process_time()
        with pytest.raises(InputError, match="too many values"):
            header_of(path)
        assert time.process_time() - start < 3
        assert tracemalloc.get_traced_memory()[1] < 200e6
    finally:
        tracemalloc.stop()


def test_every_truncation_is_refused(file):
    whole = safetensors_bytes({"a": ("F32", [2], bytes(8)), "b": ("U8", [3], b"abc")}, {"format": "pt"})
    assert set(header_of(file(whole)).entries) == {"a", "b"}
    for n in range(len(whole)):
        with pytest.raises(InputError):
            header_of(file(whole[:n]))


def test_survey_names_every_breach(file):
    header = {"a": entry(), "b": entry(offsets=[12, 20]), "c": entry(shape=[9], offsets=[20, 28])}
    rules = {(b.rule, b.tensor) for b in survey(Source(file(raw_safetensors(json.dumps(header), bytes(30)))))[1]}
    assert rules == {("order", "b"), ("bytes", "c"), ("trailing", None)}


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_mutated_files_give_a_header_or_input_error(data, tmp_path_factory):
    whole = bytearray(safetensors_bytes({"a": ("F32", [2], bytes(8)), "b": ("U8", [3], b"abc")}, {"format": "pt"}))
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "mutated.safetensors"
    path.write_bytes(whole)
    try:
        header = header_of(path)
    except InputError as e:
        assert "\n" not in str(e)
    else:
        assert sum(e.nbytes for e in header.entries.values()) == 11


SHAPES = st.lists(st.tuples(st.sampled_from(sorted(DTYPE_BITS)), st.lists(st.integers(0, 5), max_size=3)), max_size=6)


@given(tensors=SHAPES)
@settings(max_examples=100, deadline=None)
def test_write_and_read_round_trip(tmp_path_factory, tensors):
    named = [(f"t{i}", d, tuple(s)) for i, (d, s) in enumerate(tensors) if np.prod(s) * DTYPE_BITS[d] % 8 == 0]
    start, entries = header_bytes(named, {"format": "pt"})
    assert len(start) % 8 == 0
    path = tmp_path_factory.getbasetemp() / "written.safetensors"
    path.write_bytes(start + bytes(sum(e.nbytes for e in entries)))
    assert header_of(path).entries == {e.name: e for e in entries}
