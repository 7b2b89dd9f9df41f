"""GGUF files whose shapes lost leading ones, as written by llama.cpp's quantizer: [1, 64] is stored as [64]."""

from __future__ import annotations

import struct

import numpy as np
import pytest

import polyquant as pq
from architectures.golden_models import Golden


def without_ones(path, out):
    """Rewrite the file with shapes [1, n] as [n]; return the number of changed tensors."""
    weights = pq.open(path)
    raw, names = path.read_bytes(), list(weights)
    data = min(part.offset for w in weights.values() for part in w.arrays.values())
    last = names[-1].encode()
    end = raw.rindex(last, 0, data) + len(last) + 4 + 8 * len(weights[names[-1]].shape) + 12
    head, changed = raw[:end], 0
    for name, weight in weights.items():
        if len(weight.shape) == 2 and weight.shape[0] == 1:
            said = struct.pack("<Q", len(name)) + name.encode()
            sized = said + struct.pack("<IQQ", 2, weight.shape[1], 1)
            assert head.count(sized) == 1
            head, changed = head.replace(sized, said + struct.pack("<IQ", 1, weight.shape[1])), changed + 1
    out.write_bytes(head + bytes(-len(head) % 32) + raw[data:])
    return changed


@pytest.mark.parametrize("name", ["granitemoehybrid", "qwen2_moe", "qwen3_5_moe", "qwen3_next"])
def test_files_of_the_quantizer_run_and_round_trip(name, tmp_path):
    whole, dropped = Golden(name).to_gguf(tmp_path / "whole.gguf", exact=True), tmp_path / "dropped.gguf"
    assert without_ones(whole, dropped)
    tokens = np.random.default_rng(0).integers(0, 300, 20)
    a, b = (pq.load(p, activations="float").logits(tokens) for p in (whole, dropped))
    np.testing.assert_array_equal(a, b)
    for path in (whole, dropped):
        pq.convert(path, tmp_path / path.stem, to="hf")
    one, two = pq.open(tmp_path / "whole"), pq.open(tmp_path / "dropped")
    assert list(one) == list(two)
    for tensor, weight in one.items():
        assert weight.shape == two[tensor].shape
        np.testing.assert_array_equal(weight.dequantize(), two[tensor].dequantize(), err_msg=tensor)


def test_other_shapes_of_the_same_size_are_refused(tmp_path):
    path = Golden("qwen2_moe").to_gguf(tmp_path / "model.gguf", exact=True)
    raw, name = path.read_bytes(), b"blk.0.ffn_gate_inp_shexp.weight"
    at = raw.index(name) + len(name) + 4
    path.write_bytes(raw[:at] + struct.pack("<QQ", 32, 2) + raw[at + 16 :])
    with pytest.raises(pq.PolyquantError, match=r"ffn_gate_inp_shexp.*expected \[1, 64\], found \[2, 32\]"):
        pq.load(path, activations="float")
