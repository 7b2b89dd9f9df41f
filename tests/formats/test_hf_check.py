import inspect
import json
import re
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest

from folders import raw_safetensors, safetensors_bytes
from format_modules import hf
from golden import VECTORS
from polyquant.types import Severity

BF16_ONE = b"\x80\x3f"


def codes(path):
    return [f.code for f in hf.check(path)]


@pytest.mark.parametrize(
    "folder",
    ["models/tiny-llama-untied/hf", "models/tiny-llama-tied/hf", "models/tiny-bitnet/hf",
     "bitnet_gguf/hf_packed_autobitlinear", "bitnet_gguf/hf_packed_bitlinear"],
)  # fmt: skip
def test_genuine_folders_are_clean(folder):
    assert codes(VECTORS / folder) == []


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


FILES = {
    "HF001 short": b"abc",
    "HF001 claims": b"\xff" * 8 + b"{}",
    "HF002 cut": raw_safetensors('{"a"'),
    "HF002 twice": raw_safetensors('{"a":{},"a":{}}'),
    "HF003": raw_safetensors(json.dumps({"a": {"dtype": "F32"}})),
    "HF004": raw_safetensors(json.dumps({"a": entry(shape=[3])}), bytes(8)),
    "HF005 hole": raw_safetensors(json.dumps({"a": entry(), "b": entry(offsets=[12, 20])}), bytes(20)),
    "HF005 overlap": raw_safetensors(json.dumps({"a": entry(), "b": entry(offsets=[4, 12])}), bytes(12)),
    "HF006": raw_safetensors(json.dumps({"a": entry()}), bytes(7)),
    "HF007": raw_safetensors(json.dumps({"a": entry()}), bytes(9)),
    "HF008": raw_safetensors(json.dumps({"a": entry("Q9")}), bytes(8)),
    "HF009": raw_safetensors(json.dumps({"__metadata__": {"x": 1}, "a": entry()}), bytes(8)),
}


@pytest.mark.parametrize("name", FILES)
def test_header_findings(name, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(FILES[name])
    found = list(hf.check(path))
    assert [f.code for f in found] == [name[:5]]
    assert found[0].file == "model.safetensors"
    assert "\n" not in str(found[0])


def model(folder, tensors=None, config=None, **files):
    """A small sound model of one layer; arguments replace its pieces."""
    folder.mkdir(parents=True, exist_ok=True)
    if tensors is None:
        tensors = sound()
    (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    told = {
        "model_type": "llama",
        "num_hidden_layers": 1,
        "vocab_size": 4,
        "hidden_size": 2,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(told | (config or {})))
    (folder / "tokenizer.json").write_text("{}")
    for name, text in files.items():
        (folder / f"{name}.json").write_text(text)
    return folder


def sound():
    return {
        "model.embed_tokens.weight": ("BF16", [4, 2], bytes(range(16))),
        "model.layers.0.input_layernorm.weight": ("BF16", [2], BF16_ONE * 2),
    }


def head(data):
    return sound() | {"lm_head.weight": ("BF16", [4, 2], data)}


def bitnet(scale):
    tensors = sound() | {"model.layers.0.mlp.up_proj.weight": ("U8", [1, 2], b"\x55\x55")}
    return tensors | ({"model.layers.0.mlp.up_proj.weight_scale": scale} if scale else {})


BITNET = {"quantization_config": {"quant_method": "bitnet", "linear_class": "autobitlinear"}}
MODELS = {
    "clean": ({}, []),
    "no type": ({"config": {"model_type": None}}, ["HF022"]),
    "config is a list": ({"config.json": "[]"}, ["HF021"]),
    "config twice": ({"config.json": '{"a": 1, "a": 2}'}, ["HF021"]),
    "config is huge": ({"config.json": " " * 16_000_001}, ["HF021"]),
    "tokenizer broken": ({"tokenizer.json": '{"model": NaN}'}, ["HF031"]),
    "tokenizer config broken": ({"tokenizer_config.json": "{"}, ["HF031"]),
    "no config": ({"config.json": None}, ["HF020"]),
    "no tokenizer": ({"tokenizer.json": None}, ["HF030"]),
    "vocab without merges": ({"tokenizer.json": None, "vocab.json": "{}"}, ["HF030"]),
    "vocab with merges": ({"tokenizer.json": None, "vocab.json": "{}", "merges.txt": ""}, []),
    "tied, head stored, equal": ({"tensors": head(bytes(range(16)))}, ["HF023"]),
    "tied, head stored, other": ({"tensors": head(bytes(16))}, ["HF023"]),
    "not tied, no head": ({"config": {"tie_word_embeddings": False}}, ["HF024"]),
    "not tied, head": ({"config": {"tie_word_embeddings": False}, "tensors": head(bytes(16))}, []),
    "layers missing": ({"config": {"num_hidden_layers": 3}}, ["HF025"]),
    "layers too many": ({"config": {"num_hidden_layers": 0}}, ["HF025"]),
    "vocabulary": ({"config": {"vocab_size": 5}}, ["HF025"]),
    "hidden size": ({"config": {"hidden_size": 3}}, ["HF025"]),
    "packed": ({"config": BITNET, "tensors": bitnet(("BF16", [1], BF16_ONE))}, []),
    "packed without scale": ({"config": BITNET, "tensors": bitnet(None)}, ["HF060"]),
    "packed, NaN scale": ({"config": BITNET, "tensors": bitnet(("F32", [1], struct.pack("<f", np.nan)))}, ["HF060"]),
    "packed, infinite scale": ({"config": BITNET, "tensors": bitnet(("F16", [1], b"\x00\x7c"))}, ["HF060"]),
    "packed, zero scale": ({"config": BITNET, "tensors": bitnet(("BF16", [1], b"\0\0"))}, ["HF060"]),
    "packed, scale of integers": ({"config": BITNET, "tensors": bitnet(("U8", [1], b"\1"))}, ["HF060"]),
    "packed, two scales": ({"config": BITNET, "tensors": bitnet(("BF16", [2], BF16_ONE * 2))}, ["HF060"]),
    "another method": ({"config": {"quantization_config": {"quant_method": "awq"}}}, ["HF061"]),
    "index beside": ({"model.safetensors.index.json": "{}"}, ["HF018"]),
    "another file": ({"consolidated.safetensors": "x"}, ["HF015"]),
    "weights gone": ({"model.safetensors": None}, ["HF019"]),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_model_findings(name, tmp_path):
    changes, expected = MODELS[name]
    folder = model(tmp_path / "m", changes.get("tensors"), changes.get("config"))
    for file, text in changes.items():
        if "." in file and text is None:
            (folder / file).unlink()
        elif "." in file:
            (folder / file).write_text(text)
    assert codes(folder) == expected


def test_names_from_files_are_escaped(tmp_path):
    name = "a\x1b[2J\n\u202e"
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes({name: ("Q9", [1], b"x")}))
    (found,) = [f for f in hf.check(tmp_path) if f.code == "HF008"]
    assert found.tensor == name
    assert str(found).isprintable()


def test_severity_of_a_stored_head_depends_on_its_bytes(tmp_path):
    (equal,) = hf.check(model(tmp_path / "a", head(bytes(range(16)))))
    (other,) = hf.check(model(tmp_path / "b", head(bytes(16))))
    assert (equal.severity, other.severity) == (Severity.NOTE, Severity.WARNING)


def sharded(folder, index, b=None):
    model(folder, sound())
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    (folder / "model-2.safetensors").write_bytes(safetensors_bytes(b or {"b": ("F32", [2], bytes(8))}))
    (folder / "model.safetensors.index.json").write_text(json.dumps(index) if not isinstance(index, str) else index)
    return folder


WHERE = {**dict.fromkeys(sound(), "model-1.safetensors"), "b": "model-2.safetensors"}
INDEXES = {
    "clean": ({"metadata": {"total_size": 28}, "weight_map": WHERE}, []),
    "no total": ({"weight_map": WHERE}, []),
    "total": ({"metadata": {"total_size": 29}, "weight_map": WHERE}, ["HF016"]),
    "total is text": ({"metadata": {"total_size": "28"}, "weight_map": WHERE}, ["HF016"]),
    "no map": ({"metadata": {}}, ["HF010"]),
    "map is a list": ({"weight_map": ["a"]}, ["HF010"]),
    "broken": ("{", ["HF010"]),
    "twice": ('{"weight_map": {"a": "x", "a": "y"}}', ["HF010"]),
    "escape": ({"weight_map": {"a": "../x"}}, ["HF011"]),
    "shard missing": ({"weight_map": {**WHERE, "c": "model-3.safetensors"}}, ["HF012"]),
    "tensor missing": ({"weight_map": {**WHERE, "c": "model-2.safetensors"}}, ["HF013"]),
    "in another shard": ({"weight_map": {**WHERE, "b": "model-1.safetensors"}}, ["HF015", "HF013"]),
    "forgotten": ({"weight_map": dict.fromkeys(sound(), "model-1.safetensors")}, ["HF015"]),
}


@pytest.mark.parametrize("name", INDEXES)
def test_index_findings(name, tmp_path):
    index, expected = INDEXES[name]
    assert codes(sharded(tmp_path / "m", index)) == expected


def test_orphan_tensor_in_a_listed_shard(tmp_path):
    two = {"b": ("F32", [2], bytes(8)), "extra": ("F32", [1], bytes(4))}
    found = list(hf.check(sharded(tmp_path / "m", {"weight_map": WHERE}, two)))
    assert [(f.code, f.tensor) for f in found] == [("HF014", "extra")]


def test_pickle_findings(tmp_path):
    shutil.copy(VECTORS / "hf_bin" / "pytorch_model.bin", tmp_path)
    shutil.copy(VECTORS / "hf_bin" / "config.json", tmp_path)
    assert codes(tmp_path) == ["HF030", "HF051"]
    assert codes(VECTORS / "hf_bin" / "expanded.bin") == ["HF051", "HF050"]
    assert codes(VECTORS / "hf_bin" / "old.bin") == ["HF051", "HF052"]


def test_every_code_is_explained_and_used():
    source = Path(inspect.getfile(hf.check)).read_text()
    assert set(re.findall(r'"(HF\d{3})"', source)) == set(hf.CODES)
    assert all(len(text) > 60 and text.endswith(".") for text in hf.CODES.values())


def test_every_truncation_of_a_folder_gives_findings(tmp_path):
    folder = model(tmp_path / "m")
    whole = (folder / "model.safetensors").read_bytes()
    for n in range(0, len(whole), 3):
        (folder / "model.safetensors").write_bytes(whole[:n])
        found = list(hf.check(folder))
        assert any(f.severity is Severity.ERROR and f.code < "HF008" for f in found), n
