"""Checks and comparisons of headers alone: the findings of a full check, without reading the data of tensors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

import polyquant as pq
from polyquant.analysis.headers import compare_headers
from polyquant.cli import cli
from polyquant.storage.source import FileArray

VECTORS = Path(__file__).parents[1] / "vectors"
LLAMA = VECTORS / "models" / "tiny-llama-untied" / "hf"
SAMPLES = (
    "models/tiny-llama-untied/hf",
    "bitnet_gguf/tiny-bitnet-b158-tl2.gguf",
    "msmodelslim/v1/fp32/w8a8_smoothasym_c8",
    "trellis/v3_shard_writer",
)
DATA = ("TEN", "SUM", "TRL04", "TRL006", "TRL007")
"""Findings about data start with these."""


@pytest.mark.parametrize("name", SAMPLES)
def test_the_findings_are_those_of_a_full_check(name):
    full = {(f.code, f.tensor, f.message) for f in pq.validate(VECTORS / name)}
    headers = {(f.code, f.tensor, f.message) for f in pq.validate(VECTORS / name, headers=True)}
    assert headers <= full
    assert all(code.startswith(DATA) for code, *_ in full - headers)


@pytest.mark.parametrize("name", SAMPLES)
def test_no_data_is_read(name, monkeypatch):
    def refuse(self, *args):
        raise AssertionError("reads data")

    for method in ("read", "view", "pieces"):
        monkeypatch.setattr(FileArray, method, refuse)
    pq.validate(VECTORS / name, headers=True)
    compare_headers(VECTORS / name, VECTORS / name)


def test_a_missing_tensor_and_a_wrong_shape_are_found(tmp_path):
    shutil.copytree(LLAMA, tmp_path / "m")
    tensors = load_file(LLAMA / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "m" / "model.safetensors")
    assert "MOD002" in {f.code for f in pq.validate(tmp_path / "m", headers=True)}


def test_headers_only_excludes_comparisons_of_data():
    for options in ({"against": LLAMA}, {"checksums": "x"}):
        with pytest.raises(pq.PlanError, match="headers only"):
            pq.validate(LLAMA, headers=True, **options)


def test_compare_headers(tmp_path, capsys):
    pq.convert(LLAMA, tmp_path / "m.gguf", codec="q8_0")
    same = compare_headers(LLAMA, tmp_path / "m.gguf")
    assert not same.misfits
    assert not same.only_a
    assert {t.b for t in same.tensors} == {"q8_0", "f32"}
    shutil.copytree(LLAMA, tmp_path / "m")
    tensors = load_file(LLAMA / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:10].copy()
    tensors["extra"] = tensors.pop("model.norm.weight")
    save_file(tensors, tmp_path / "m" / "model.safetensors")
    config = json.loads((LLAMA / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps(config | {"rope_theta": 1.0}))
    other = compare_headers(LLAMA, tmp_path / "m")
    assert [t.name for t in other.misfits] == ["lm_head.weight"]
    assert (other.only_a, other.only_b) == (("model.norm.weight",), ("extra",))
    assert "rope_theta" in other.metadata
    assert other.to_json()["metadata"] == list(other.metadata)
    assert "1 of different shapes" in repr(other)
    assert "lm_head.weight" in other._repr_html_()
    cli.main(["compare", str(LLAMA), str(tmp_path / "m"), "--headers"], standalone_mode=False)
    out = capsys.readouterr().out
    assert "1 of different shapes" in out
    assert "only in B: extra" in out
    assert "metadata that differs: rope_theta" in out
    cli.main(["compare", str(LLAMA), str(LLAMA), "--headers", "--format", "json"], standalone_mode=False)
    assert len(json.loads(capsys.readouterr().out)["tensors"]) == len(pq.open(LLAMA))
    cli.main(["validate", str(tmp_path / "m.gguf"), "--headers"], standalone_mode=False)
    assert "sound" in (out := capsys.readouterr().out)
    assert "data not read" in out


def test_nothing_in_common(tmp_path):
    save_file({"x": load_file(LLAMA / "model.safetensors")["model.norm.weight"]}, tmp_path / "x.safetensors")
    with pytest.raises(pq.PlanError, match=r"no tensor of .* is in"):
        compare_headers(LLAMA / "model.safetensors", tmp_path / "x.safetensors")
