"""Every architecture against its reference logits (tests/vectors/runtime/README.md)."""

from __future__ import annotations

import json
import resource
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

import polyquant as pq
from golden import VECTORS, arrays

MODELS = VECTORS / "runtime"
NAMES = sorted(p.name for p in MODELS.iterdir() if p.is_dir())
UNSAID_BY_GGUF = {"mistral-window", "qwen2-windows", "llama-yarn-mscale"}
"""Sliding windows, mscale and truncate have no keys there."""


def close(found: np.ndarray, name: str) -> None:
    np.testing.assert_allclose(found, arrays(f"runtime/{name}/logits.npz")["logits"], rtol=0, atol=1e-4)


def tokens(name: str) -> np.ndarray:
    return arrays(f"runtime/{name}/logits.npz")["tokens"]


@pytest.mark.parametrize("name", NAMES)
def test_folders(name, engine):
    close(pq.load(MODELS / name).logits(tokens(name)), name)


@pytest.mark.parametrize("name", NAMES)
def test_token_by_token(name):
    session = pq.load(MODELS / name).session()
    close(np.array([session.feed([t]) for t in tokens(name)]), name)


@pytest.mark.parametrize("name", [n for n in NAMES if n not in UNSAID_BY_GGUF])
def test_converted_to_gguf_and_back(name, tmp_path):
    pq.convert(MODELS / name, tmp_path / "x.gguf", to="gguf", codec="f32")
    close(pq.load(tmp_path / "x.gguf").logits(tokens(name)), name)
    pq.convert(tmp_path / "x.gguf", tmp_path / "hf", to="hf", codec="f32")
    close(pq.load(tmp_path / "hf").logits(tokens(name)), name)


def test_biases_move_with_their_rows(tmp_path):
    pq.convert(MODELS / "llama-biases-wide-head", tmp_path / "x.gguf", to="gguf", codec="f32")
    compared = pq.compare(MODELS / "llama-biases-wide-head", tmp_path / "x.gguf")
    assert compared.error.worst == 0


SOUND = VECTORS / "models/tiny-llama-tied/tiny-llama-tied-Q4_0.gguf"
ALIASES = {
    "block_count": "n_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "n_embd",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "n_heads",
    "attention.head_count_kv": "n_kv_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
}


@pytest.mark.parametrize("prefix", ["llama.", ""])
def test_metadata_under_alias_names(prefix, tmp_path):
    renamed = {f"llama.{key}": prefix + alias for key, alias in ALIASES.items() if f"llama.{key}" != prefix + alias}
    pq.edit(SOUND, tmp_path / "x.gguf", rename=renamed, remove=["llama.rope.dimension_count"])
    model, plain = pq.load(tmp_path / "x.gguf"), pq.load(SOUND)
    assert model.decoder.hyper == plain.decoder.hyper
    np.testing.assert_array_equal(model.logits([3, 1, 4]), plain.logits([3, 1, 4]))


def test_unused_tensors_are_reported(tmp_path):
    config = json.loads((MODELS / "qwen2/config.json").read_text())
    shutil.copytree(MODELS / "qwen2", tmp_path / "m")
    (tmp_path / "m/config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    notes = pq.load(tmp_path / "m").checkpoint.notes
    assert any("12 tensors are not part of this architecture" in n and "model.layers.1." in n for n in notes)
    assert not pq.load(MODELS / "qwen2").checkpoint.notes and not pq.load(MODELS / "chatglm2").checkpoint.notes


def resident() -> int:
    """Bytes of memory that this process holds now, maps that were touched included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="Linux tells the memory that a process holds")
def test_loading_reads_vectors_only(tmp_path):
    """A sparse folder of a gigabyte: loading maps it and reads only norms."""
    config = json.loads((MODELS / "llama-linear/config.json").read_text())
    hidden, layers = 4096, 4
    config |= {"hidden_size": hidden, "intermediate_size": 8192, "num_hidden_layers": layers, "head_dim": 1024}
    header, at = {}, 0
    shapes = {"model.embed_tokens": (64, hidden), "model.norm": (hidden,), "lm_head": (64, hidden)}
    for i in range(layers):
        p = f"model.layers.{i}."
        shapes |= {f"{p}input_layernorm": (hidden,), f"{p}post_attention_layernorm": (hidden,)}
        shapes |= {f"{p}self_attn.{n}_proj": (hidden if n in "qo" else hidden // 2, hidden) for n in "qkvo"}
        shapes |= {f"{p}mlp.{n}_proj": (8192, hidden) for n in ("gate", "up")} | {f"{p}mlp.down_proj": (hidden, 8192)}
    for name, shape in shapes.items():
        size = 2 * int(np.prod(shape))
        header[f"{name}.weight"] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    raw = json.dumps(header).encode()
    (tmp_path / "config.json").write_text(json.dumps(config))
    with (tmp_path / "model.safetensors").open("wb") as f:
        f.write(len(raw).to_bytes(8, "little") + raw)
        f.truncate(8 + len(raw) + at)
    assert at > 1e9
    pq.load(MODELS / "llama-linear")  # exclude the cost of the first load of a process: up to 0.33 s of imports
    before, began = resident(), time.process_time()
    model = pq.load(tmp_path)
    assert time.process_time() - began < 0.3
    assert resident() - before < 50e6
    assert model.checkpoint.nbytes == at
