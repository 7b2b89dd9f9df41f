from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

import polyquant as pq
from polyquant.errors import PlanError
from polyquant.trellis.loader import TrellisModelLoader
from polyquant.trellis.quantizer import TrellisQuantizer


@pytest.fixture
def tiny(tmp_path):
    """Two matrices and a norm, as a Hugging Face folder."""
    rng = np.random.default_rng(0)
    folder = tmp_path / "tiny"
    folder.mkdir()
    tensors = {f"model.layers.{i}.mlp.up_proj.weight": rng.standard_normal((48, 32), np.float32) for i in range(2)}
    save_file({**tensors, "model.norm.weight": np.ones(32, np.float32)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"torch_dtype": "float32"}))
    return folder


def test_save_equals_quantize(tiny, tmp_path):
    quantizer = TrellisQuantizer(tiny, bits=2, codebook="grid")
    plan = quantizer.plan()
    report = quantizer.save(output_path=tmp_path / "a", shard_size="2GB")
    pq.quantize(tiny, tmp_path / "b", to="trellis-v3", bits=2, codebook="grid")
    files = {p.name for p in (tmp_path / "a").iterdir()}
    assert files == {p.name for p in (tmp_path / "b").iterdir()} >= {"quantization_config.json", "config.json"}
    assert all((tmp_path / "a" / f).read_bytes() == (tmp_path / "b" / f).read_bytes() for f in files)
    assert report.nbytes == plan.nbytes
    assert set(TrellisModelLoader(tmp_path / "a").quantization.values()) == {2}


def test_default_is_three_bits(tiny):
    def codecs(**options):
        return {s.target.name for s in TrellisQuantizer(tiny, **options).plan().steps if ".mlp." in s.map.target}

    assert codecs() == {"trellis.3"}
    assert codecs(effort="max") == {"trellis.3.mul1.16"}
    assert codecs(bits=5, effort="fast") == {"trellis.5.mul1.12"}
    assert codecs(codec="trellis.4.grid") == {"trellis.4.grid"}


def test_invalid_options(tiny, tmp_path):
    with pytest.raises(PlanError, match="not a shard size"):
        TrellisQuantizer(tiny).save(tmp_path / "out", shard_size="large")
    with pytest.raises(PlanError, match=r"number of bits .expected 2 to 8"):
        TrellisQuantizer(tiny, bits=9).plan()
    assert not (tmp_path / "out").exists()
