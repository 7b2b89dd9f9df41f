"""Weights as arrays, and unknown tensor names."""

from __future__ import annotations

import time

import numpy as np
import pytest

import polyquant as pq
from polyquant.analysis.demo import demo_model
from polyquant.types import Checkpoint


@pytest.fixture(scope="module")
def gguf(tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "a.gguf"
    pq.convert(demo_model("llama"), path, recipe="q4_0")
    return path


def test_asarray_gives_the_floats(gguf):
    weight = pq.open(gguf)["blk.0.attn_q.weight"]
    floats = weight.dequantize()
    assert np.asarray(weight).dtype == np.float32
    np.testing.assert_array_equal(np.asarray(weight), floats)
    np.testing.assert_array_equal(np.asarray(weight, np.float16), floats.astype(np.float16))
    np.testing.assert_array_equal(np.add(weight, 1), floats + 1)
    assert np.array(weight, copy=True).flags.writeable


def test_wide_types_keep_their_values(tmp_path):
    wide = np.array([[1 + 2**-40, -3]], np.float64)
    counts = np.array([[2**40, -(2**41) - 1]], np.int64)
    pq.save({"f": wide, "i": counts}, tmp_path / "a.gguf")
    opened = pq.open(tmp_path / "a.gguf")
    np.testing.assert_array_equal(np.asarray(opened["f"], np.float64), wide)
    np.testing.assert_array_equal(np.asarray(opened["i"], np.int64), counts)


@pytest.mark.skipif(np.lib.NumpyVersion(np.__version__) < "2.0.0", reason="copy= is of NumPy 2")
def test_a_view_is_refused(gguf):
    with pytest.raises(ValueError, match="copy=False"):
        np.asarray(pq.open(gguf)["blk.0.attn_q.weight"], copy=False)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("blk.0.attn_k.weigth", "did you mean blk.0.attn_k.weight"),
        ("model.layers.3.mlp.down_proj.weight", "this checkpoint calls it 'blk.3.ffn_down.weight'"),
        ("model.embed_tokens.weight", "this checkpoint calls it 'token_embd.weight'"),
        ("completely different", "known: "),
    ],
)
def test_missing_names(gguf, name, says):
    checkpoint = pq.open(gguf)
    with pytest.raises(KeyError) as caught:
        checkpoint[name]
    assert isinstance(caught.value, pq.UnknownNameError)
    assert says in str(caught.value) and str(gguf) in str(caught.value) and "\n" not in str(caught.value)
    assert name not in checkpoint and checkpoint.get(name) is None and checkpoint.get(name, 3) == 3


def test_gguf_names_in_a_folder():
    with pytest.raises(KeyError, match=r"this checkpoint calls it 'model\.layers\.1\.self_attn\.v_proj\.weight'"):
        pq.open(demo_model("llama"))["blk.1.attn_v.weight"]


def test_membership_tests_are_cheap(gguf):
    weight = next(iter(pq.open(gguf).values()))
    many = Checkpoint("gguf", gguf, {f"blk.{i}.attn_q.weight": weight for i in range(20_000)})
    start = time.perf_counter()
    assert not any(f"blk.{i}.attn_k.weight" in many for i in range(1000))
    assert [many.get(f"blk.{i}.attn_k.weight") for i in range(1000)] == [None] * 1000
    assert time.perf_counter() - start < 1  # near names are looked for in errors only: 20 ms each
