"""Saved tensors read back equal: random names, shapes, dtypes and metadata, in files and folders."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import polyquant as pq
from polyquant.errors import PolyquantError

MANY = settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
DTYPES = [
    np.float64, np.float32, np.float16, ml_dtypes.bfloat16, np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16,
    np.uint32, np.uint64, np.bool_, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2,
]  # fmt: skip
BLOCKS = ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q6_k", "tq2_0", "iq4_nl", "mxfp4"]
names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20) | st.sampled_from(
    ["a", "__metadata__", "model.layers.0.weight", "a.weight", "a.weight_scale", "a.qweight", "a/b", "..", "\u202e",
     "x" * 63]
)  # fmt: skip
shapes = st.lists(st.integers(0, 9), max_size=5).map(tuple)
scalars = st.text(max_size=20) | st.integers(-(2**31), 2**31) | st.booleans() | st.floats(allow_nan=False, width=32)
keys = st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1, max_size=12)


@st.composite
def arrays(draw):
    """One array of any dtype with any bytes."""
    dtype, shape = np.dtype(draw(st.sampled_from(DTYPES))), draw(shapes)
    count = int(np.prod(shape, dtype=int))
    raw = np.random.default_rng(draw(st.integers(0, 99))).bytes(count * dtype.itemsize)
    if dtype == np.bool_:
        raw = bytes(b & 1 for b in raw)
    return np.frombuffer(raw, dtype).reshape(shape)


def same(path, given_arrays):
    opened = pq.open(path)
    assert set(opened) == set(given_arrays)
    for name, array in given_arrays.items():
        (part,) = opened[name].read().values()
        assert part.tobytes() == np.ascontiguousarray(array).tobytes(), name
        squeezed = tuple(n for n in opened[name].shape if n != 1)
        assert squeezed == tuple(n for n in array.shape if n != 1), name
        if not opened[name].codec.name.startswith("undecoded"):  # integers that a linear layer has no scales for
            assert opened[name].codec.dtype == array.dtype


@pytest.mark.parametrize("target", ["x.gguf", "x.safetensors", "folder"])
@MANY
@given(tensors=st.dictionaries(names, arrays(), min_size=1, max_size=5))
def test_arrays_read_back_equal_or_are_refused_before_writing(target, tensors, tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / target
    try:
        pq.save(tensors, path)
    except PolyquantError as problem:
        assert "\n" not in str(problem) and not list(path.parent.iterdir())
        return
    same(path, tensors)
    structural = [f for f in pq.validate(path) if f.code[:3] != "TEN" and f.code != "HF065"]  # NaN; integer layers
    assert not [f for f in structural if f.severity.name == "ERROR"]


@MANY
@given(
    codec=st.sampled_from(BLOCKS),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 2)),
    seed=st.integers(0, 99),
    threads=st.sampled_from([1, 2]),
)
def test_codes_read_back_equal(codec, shape, seed, threads, tmp_path_factory):
    """The bytes in the file are those that the codec packs; a copy to another file has them too."""
    experts, rows, blocks = shape
    w = np.random.default_rng(seed).normal(size=(experts, 4 * rows, 256 * blocks)).astype(np.float32)
    folder = tmp_path_factory.mktemp("codes")
    pq.save({"a.weight": w}, folder / "x.gguf", codec=codec, threads=threads)
    stored = pq.open(folder / "x.gguf")["a.weight"]
    known = pq.codec(codec)
    for part, array in known.pack(known.quantize(w.reshape(-1, w.shape[-1]))).items():
        assert stored.read()[part].tobytes() == array.tobytes()
    pq.save({"b": stored}, folder / "y.gguf")
    copied = pq.open(folder / "y.gguf")["b"]
    assert {k: v.tobytes() for k, v in copied.read().items()} == {k: v.tobytes() for k, v in stored.read().items()}


@pytest.mark.parametrize("target", ["x.gguf", "x.safetensors"])
@MANY
@given(metadata=st.dictionaries(keys, scalars | st.lists(st.text(max_size=5), min_size=1, max_size=4), max_size=4))
def test_metadata_reads_back_equal_or_is_refused(target, metadata, tmp_path_factory):
    path = tmp_path_factory.mktemp("metadata") / target
    try:
        pq.save({"a": np.ones(3, np.float32)}, path, metadata=metadata)
    except PolyquantError as problem:
        assert "\n" not in str(problem)
        return
    found = pq.open(path).metadata
    for key, value in metadata.items():
        assert found[key] == (np.float32(value) if isinstance(value, float) and target == "x.gguf" else value)
