"""Mutated folders: opening gives weights or a one-line error; checking always gives findings."""

import json
import random
import shutil

import pytest

from folders import mutate, safetensors_bytes
from format_modules import hf
from golden import VECTORS
from polyquant.errors import PolyquantError


def sharded(folder):
    """Two shards with an index, a packed BitNet pair, and a tokenizer."""
    folder.mkdir()
    one = {
        "model.embed_tokens.weight": ("BF16", [4, 2], bytes(range(16))),
        "model.layers.0.mlp.up_proj.weight": ("U8", [1, 2], b"\x55\x55"),
    }
    two = {"model.layers.0.mlp.up_proj.weight_scale": ("BF16", [1], b"\x80\x3f"), "s": ("F32", [], bytes(4))}
    (folder / "a.safetensors").write_bytes(safetensors_bytes(one, {"format": "pt"}))
    (folder / "b.safetensors").write_bytes(safetensors_bytes(two))
    weight_map = {**dict.fromkeys(one, "a.safetensors"), **dict.fromkeys(two, "b.safetensors")}
    index = {"metadata": {"total_size": 24}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {
        "model_type": "bitnet",
        "num_hidden_layers": 1,
        "vocab_size": 4,
        "hidden_size": 2,
        "tie_word_embeddings": True,
    }
    packed = {"quantization_config": {"quant_method": "bitnet", "linear_class": "autobitlinear"}}
    (folder / "config.json").write_text(json.dumps(config | packed))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def torch_folder(folder):
    folder.mkdir()
    shutil.copy(VECTORS / "hf_bin" / "views.bin", folder / "pytorch_model.bin")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


def fuzz(folder, rounds, seed):
    rng = random.Random(seed)
    originals = {p: p.read_bytes() for p in sorted(folder.iterdir())}
    opened = 0
    for _ in range(rounds):
        path = rng.choice(list(originals))
        path.write_bytes(mutate(originals[path], rng))
        try:
            checkpoint = hf.open(folder)
            opened += 1
            for w in checkpoint.values():
                assert sum(a.nbytes for a in w.read().values()) == w.nbytes
        except PolyquantError as e:
            assert "\n" not in str(e)
        for finding in hf.check(folder):
            assert finding.code in hf.CODES
            assert "\n" not in str(finding)
        path.write_bytes(originals[path])
    return opened


@pytest.mark.parametrize("make", [sharded, torch_folder])
def test_mutated_folders(make, tmp_path):
    assert 0 < fuzz(make(tmp_path / "m"), 300, 1) < 300


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("make", [sharded, torch_folder])
def test_mutated_folders_for_longer(make, seed, tmp_path):
    assert fuzz(make(tmp_path / "m"), 2_000, 100 + seed)
