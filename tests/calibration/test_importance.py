"""Importance matrices as llama.cpp writes them: one row for a matrix, one for each expert of a stack."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

import polyquant as pq
from folders import fill
from format_modules import gguf
from polyquant.calibration.importance import load_importance
from polyquant.errors import InputError
from polyquant.types import Kind, Meta, TensorSpec


def written(folder, tensors):
    """A GGUF of float32 tensors."""
    f32 = pq.codec("f32")
    found = {n: SimpleNamespace(shape=w.shape, codec=f32, parts=f32.pack(f32.quantize(w))) for n, w in tensors.items()}
    specs = [TensorSpec(n, w.shape, f32) for n, w in found.items()]
    metadata = {"general.architecture": Meta(Kind.STRING, "x"), "general.type": Meta(Kind.STRING, "imatrix")}
    fill(gguf.lay_out(specs, metadata, name="imatrix.gguf"), folder, found)
    return folder / "imatrix.gguf"


def test_importance_is_the_mean_square_of_each_column(tmp_path):
    total = np.random.default_rng(0).random((1, 64)).astype(np.float32)
    path = written(tmp_path, {"a.in_sum2": total, "a.counts": np.full((1, 1), 4, np.float32)})
    found = load_importance(path)["a"]
    assert found.shape == (64,)
    np.testing.assert_array_equal(found, total[0] / np.float32(4))


def test_importance_per_expert_is_uniform_without_tokens(tmp_path):
    total = np.random.default_rng(0).random((3, 64)).astype(np.float32)
    total[1] = 0
    counts = np.array([[4], [0], [8]], np.float32)
    found = load_importance(written(tmp_path, {"a.in_sum2": total, "a.counts": counts}))["a"]
    np.testing.assert_array_equal(found[[0, 2]], total[[0, 2]] / counts[[0, 2]])
    np.testing.assert_array_equal(found[1], np.ones(64, np.float32))


def test_mismatched_counts_are_refused(tmp_path):
    path = written(tmp_path, {"a.in_sum2": np.ones((1, 64), np.float32), "a.counts": np.ones((3, 1), np.float32)})
    with pytest.raises(InputError, match="do not match the number of experts"):
        load_importance(path)
