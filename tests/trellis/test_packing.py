"""Indices <-> bytes with their header byte, compared with the format's original packer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from polyquant.errors import CodecError
from polyquant.trellis.packing import BITS, pack_indices, unpack_indices

VECTORS = load_file(Path(__file__).parents[1] / "vectors" / "trellis" / "packing_vectors.safetensors")


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("count", [1, 255, 256, 768])
def test_bytes_equal_metal_marlin(bits, count):
    indices, packed = VECTORS[f"b{bits}_n{count}_indices"], VECTORS[f"b{bits}_n{count}_packed"]
    assert np.array_equal(pack_indices(indices, bits), packed)
    for stored in (packed, VECTORS[f"b{bits}_n{count}_packed_vectorized"]):
        found, said = unpack_indices(stored, count)
        assert said == bits and found.dtype == indices.dtype and np.array_equal(found, indices)


def test_the_documents_example_has_97_bytes():
    packed = pack_indices(np.arange(256) % 8, 3)
    assert packed.shape == (97,) and packed[0] == 0x03


@given(st.integers(2, 8).flatmap(lambda b: st.tuples(st.just(b), st.lists(st.integers(0, 2**b - 1), max_size=300))))
def test_packing_is_lossless(case):
    bits, indices = case
    packed = pack_indices(np.array(indices, np.int64), bits)
    assert len(packed) == 1 + -(-len(indices) * bits // 8)
    assert unpack_indices(packed, len(indices))[0].tolist() == indices


@pytest.mark.parametrize(
    ("indices", "bits", "words"),
    [
        ([0], 1, "expected 2 to 8"), ([0], 9, "expected 2 to 8"), ([8], 3, "0 to 7"), ([-1], 3, "0 to 7"),
        ([0.5], 3, "integers"),
    ],
)  # fmt: skip
def test_indices_out_of_range(indices, bits, words):
    with pytest.raises(CodecError, match=words):
        pack_indices(indices, bits)


@pytest.mark.parametrize(
    ("packed", "count", "words"),
    [
        (np.zeros(0, np.uint8), 0, "header byte"), (np.array([1, 0], np.uint8), 1, "2 to 8"),
        (np.array([9, 0], np.uint8), 1, "2 to 8"),
        (np.array([3, 0], np.uint8), 3, "too short"), (np.array([3, 0], np.int16), 1, "uint8"),
        (np.array([3], np.uint8), -1, "header byte"),
    ],
)  # fmt: skip
def test_invalid_packed_indices(packed, count, words):
    with pytest.raises(CodecError, match=words):
        unpack_indices(packed, count)
