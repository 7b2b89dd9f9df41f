"""Shards hold the layers in their order, each with its norms, for any order in the source."""

from __future__ import annotations

import json
import re
from itertools import pairwise

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

import polyquant as pq

LAYERS, HIDDEN, INNER, VOCAB = 12, 32, 64, 64
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INNER,
    "vocab_size": VOCAB,
    "num_hidden_layers": LAYERS, "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "float32",
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model of twelve layers in one file, which safetensors sorts as text: 0, 1, 10, 11, 2."""
    folder, rng = tmp_path_factory.mktemp("twelve"), np.random.default_rng(0)
    shapes = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "lm_head.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        shapes |= {f"{layer}.self_attn.{x}_proj.weight": (HIDDEN, HIDDEN) for x in "qkvo"}
        shapes |= {f"{layer}.mlp.{x}_proj.weight": (INNER, HIDDEN) for x in ("gate", "up")}
        shapes |= {f"{layer}.mlp.down_proj.weight": (HIDDEN, INNER)}
        shapes |= {f"{layer}.{x}_layernorm.weight": (HIDDEN,) for x in ("input", "post_attention")}
    save_file({n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    names = [n for n in pq.open(folder) if ".layers." in n]
    assert [int(n.split(".")[2]) for n in names] != sorted(int(n.split(".")[2]) for n in names)
    return folder


def shards(folder):
    """Names of the tensors of each shard, in the order of the shards."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "numpy") as file:
            yield list(file.keys())


def place(name):
    """0 before the layers, 1 + number inside, then 1 + LAYERS."""
    found = re.search(r"\.layers\.(\d+)\.", name)
    return 1 + int(found[1]) if found else 0 if "embed" in name else 1 + LAYERS


WRITERS = {
    "hf": {"to": "hf"},
    "trellis-v3": {"to": "trellis-v3", "codec": "trellis.4.grid"},
    "msmodelslim v1": {"to": "msmodelslim", "codec": "w8a16"},
    "msmodelslim v0": {"to": "msmodelslim", "codec": "w8a16", "dialect": "v0"},
}


@pytest.mark.parametrize("writer", WRITERS)
def test_folders_hold_layers_in_order(writer, model, tmp_path):
    pq.convert(model, tmp_path / "out", shard_bytes=24_000, **WRITERS[writer])
    found = list(shards(tmp_path / "out"))
    assert len(found) > 4
    spans = [(min(map(place, names)), max(map(place, names))) for names in found]
    if writer == "msmodelslim v1":  # as the tool writes: the embeddings follow the layers
        spans = [(min(p), max(p)) for names in found if (p := [place(n) for n in names if ".layers." in n])]
    assert all(before[1] <= after[0] for before, after in pairwise(spans)), spans


def test_norms_are_stored_with_their_layer(model, tmp_path):
    pq.convert(model, tmp_path / "out", shard_bytes=24_000, to="hf")
    homes = {name: i for i, names in enumerate(shards(tmp_path / "out")) for name in names}
    for i in range(LAYERS):
        own = {home for name, home in homes.items() if place(name) == 1 + i and "norm" not in name}
        assert {homes[f"model.layers.{i}.{x}_layernorm.weight"] for x in ("input", "post_attention")} <= own


def test_gguf_layers_are_in_order_and_stay_in_order(model, tmp_path):
    pq.convert(model, tmp_path / "a.gguf")
    numbers = [int(n.split(".")[1]) for n in pq.open(tmp_path / "a.gguf") if n.startswith("blk.")]
    assert numbers == sorted(numbers)
    pq.convert(tmp_path / "a.gguf", tmp_path / "b.gguf", codec="q8_0")
    assert list(pq.open(tmp_path / "b.gguf")) == list(pq.open(tmp_path / "a.gguf"))
    pq.convert(tmp_path / "b.gguf", tmp_path / "back", to="hf", codec="f32", shard_bytes=24_000)
    assert {n: pq.open(tmp_path / "back")[n].shape for n in pq.open(model)} == {
        n: w.shape for n, w in pq.open(model).items()
    }
