"""Floats -> an EXL3 folder -> Trellis v3 and back: the codes are unchanged."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

import polyquant as pq
from polyquant.errors import PolyquantError
from polyquant.trellis.converter import convert_to_v3
from polyquant.trellis.loader import TrellisModelLoader

NAME = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def exl3(tmp_path_factory):
    root = tmp_path_factory.mktemp("exl3")
    (root / "float").mkdir()
    w = np.random.default_rng(0).standard_normal((128, 128), np.float32)
    save_file({NAME: w, "model.norm.weight": np.ones(128, np.float32)}, root / "float" / "model.safetensors")
    (root / "float" / "config.json").write_text(json.dumps({"torch_dtype": "float32"}))
    pq.convert(root / "float", root / "exl3", to="hf", codec="exl3.2.mul1")
    return root / "exl3", w


def test_floats_become_exl3(exl3):
    folder, w = exl3
    weight = pq.open(folder)[NAME]
    assert weight.codec.name == "exl3.2.mul1"
    assert np.square(weight.dequantize() - w).mean() < 0.075


def test_codes_round_trip_through_v3(exl3, tmp_path):
    folder, _ = exl3
    convert_to_v3(TrellisModelLoader(folder), tmp_path / "v3")
    pq.convert(tmp_path / "v3", tmp_path / "back", to="hf", codec="exl3.2.mul1")
    first, again = pq.open(folder)[NAME], pq.open(tmp_path / "back")[NAME]
    assert all(np.array_equal(first.parts[p], again.parts[p]) for p in first.parts)
    want = first.dequantize()
    assert np.array_equal(pq.open(tmp_path / "v3")[NAME].dequantize(), want)
    assert np.array_equal(TrellisModelLoader(tmp_path / "v3").load_weight(NAME).dequantize(), want)


def test_scales_that_exl3_cannot_store_are_refused(exl3, tmp_path):
    """v3 has a scale for each output inside of the rotation; EXL3 has none."""
    folder, _ = exl3
    pq.quantize(folder.parent / "float", tmp_path / "v3", to="trellis-v3", codec="trellis.2.mul1.16.exl3")
    with pytest.raises(PolyquantError, match="no per-output scale inside its rotation"):
        pq.convert(tmp_path / "v3", tmp_path / "back", to="hf", codec="exl3.2.mul1")
    assert not (tmp_path / "back").exists()
