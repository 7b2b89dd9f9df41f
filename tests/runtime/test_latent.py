"""Latent attention: the contents of its cache, and its formula with keys and values for each head, as in training."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import polyquant as pq
from golden import VECTORS
from polyquant.architectures.hyper import Hyper
from polyquant.errors import InputError
from polyquant.opening import open_checkpoint
from polyquant.ops.decoder import rotate
from polyquant.runtime.kv_cache import KVCache
from polyquant.runtime.latent import latent_scale
from polyquant.runtime.load import assemble, load

MODELS = VECTORS / "architectures"


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
def test_heads_computed_separately(name, engine):
    """The first layer with keys [heads, nope + rope] and values [heads, value] of kv_b_proj, in float64."""
    model = load(MODELS / name, activations="float")
    config, decoder = model.checkpoint.config, model.decoder
    heads, lora = config["num_attention_heads"], config["kv_lora_rank"]
    nope, value = config["qk_nope_head_dim"], config["v_head_dim"]
    x = np.random.default_rng(3).standard_normal((40, config["hidden_size"]), np.float32)
    cos, sin = decoder.rotaries[0].angles(0, len(x))

    def w(stem: str) -> np.ndarray:
        return model.checkpoint[f"model.layers.0.{stem}.weight"].dequantize().astype(np.float64)

    def normed(y: np.ndarray, stem: str) -> np.ndarray:
        return y / np.sqrt(np.square(y).mean(-1, keepdims=True) + config["rms_norm_eps"]) * w(stem)

    def turned(y: np.ndarray) -> np.ndarray:
        return rotate(np.ascontiguousarray(y, np.float32), cos, sin, interleaved=True).astype(np.float64)

    h = normed(x.astype(np.float64), "input_layernorm")
    if config["q_lora_rank"]:
        q = normed(h @ w("self_attn.q_a_proj").T, "self_attn.q_a_layernorm") @ w("self_attn.q_b_proj").T
    else:
        q = h @ w("self_attn.q_proj").T
    kv = h @ w("self_attn.kv_a_proj_with_mqa").T
    both = normed(kv[:, :lora], "self_attn.kv_a_layernorm") @ w("self_attn.kv_b_proj").T
    q, both = q.reshape(len(x), heads, -1), both.reshape(len(x), heads, nope + value)
    q_rope, k_rope = turned(q[..., nope:]), turned(kv[:, None, lora:])
    scores = np.einsum("thd,shd->hts", q[..., :nope], both[..., :nope]) + np.einsum("thd,sd->hts", q_rope, k_rope[:, 0])
    scores = np.where(np.tri(len(x), dtype=bool), scores * latent_scale(decoder.hyper), -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    values = np.einsum("hts,shv->thv", weights, both[..., nope:]).reshape(len(x), -1)
    expected = values @ w("self_attn.o_proj").T
    attention, cache = decoder.layers[0].attention, decoder.cache()
    rotations = decoder._rotations(cache, len(x))
    found = attention(x, rotations, cache)
    np.testing.assert_allclose(found, expected, atol=2e-5 * np.abs(expected).max())


def test_memory_per_position():
    """One head of kv_lora + rope values, for any number of heads."""
    model = load(MODELS / "deepseek_v3")
    config, cache = model.checkpoint.config, model.decoder.cache()
    model.decoder.hidden(np.arange(32), cache)
    size = config["kv_lora_rank"] + config["qk_rope_head_dim"]
    assert cache.nbytes == config["num_hidden_layers"] * 32 * 2 * size * 4
    assert KVCache([layer.state_spec for layer in model.decoder.layers]).layers[0].keys.shape[::2] == (1, size)


def test_scale():
    usual = {
        "layers": 1, "context": 8, "hidden": 8, "feed_forward": 8, "heads": 2, "kv_heads": 2, "head_dim": 64,
        "norm_eps": 1e-6, "rope_theta": 1e4, "vocab": 8,
        "more": {"nope_head": 128},
    }  # fmt: skip
    plain = 192**-0.5
    for rope, wanted in (
        ({}, plain),
        ({"rope_type": "yarn", "factor": 40.0}, plain),
        ({"rope_type": "yarn", "factor": 0.5, "mscale_all_dim": 1.0}, plain),
        ({"rope_type": "yarn", "factor": 40.0, "mscale_all_dim": 0.707}, plain * 1.2608037**2),
    ):
        assert latent_scale(Hyper(**usual, rope=rope)) == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
def test_files_from_before_the_split(name, tmp_path):
    """llama.cpp's converter of 2024 did not split kv_b_proj, and wrote the size of its key heads."""
    gguf = tmp_path / "new.gguf"
    pq.convert(MODELS / name, gguf, to="gguf", codec="bf16")
    wanted = load(gguf).logits([3, 1, 4, 1, 5])
    folder, new = open_checkpoint(MODELS / name), open_checkpoint(gguf)
    config = folder.config
    weights = {n: w for n, w in new.weights.items() if "attn_k_b" not in n and "attn_v_b" not in n}
    for i in range(config["num_hidden_layers"]):
        stored = f"blk.{i}.attn_kv_b.weight"
        weights[stored] = replace(folder[f"model.layers.{i}.self_attn.kv_b_proj.weight"], name=stored)
    metadata = {key: value for key, value in new.metadata.items() if not key.endswith("_mla")}
    metadata |= {
        "deepseek2.attention.head_count_kv": config["num_attention_heads"],
        "deepseek2.attention.key_length": config["qk_nope_head_dim"] + config["qk_rope_head_dim"],
        "deepseek2.attention.value_length": config["v_head_dim"],
    }
    old = replace(new, weights=weights, metadata=metadata)
    found = assemble(old)
    np.testing.assert_allclose(found.logits([3, 1, 4, 1, 5]), wanted, rtol=0, atol=1e-5)
    assert not found.checkpoint.notes
    del weights["blk.0.attn_kv_b.weight"]
    with pytest.raises(InputError, match="is missing"):
        assemble(old)


@pytest.mark.parametrize("codec", ["w8a16", "w8a8.dynamic"])
def test_a_folder_of_quantized_matrices(codec, tmp_path):
    """Stacks that codecs of matrices cannot hold (heads of kv_b_proj) stay floats; experts are stored separately."""
    pq.quantize(MODELS / "deepseek_v3", tmp_path / "q", to="msmodelslim", codec=codec)
    wanted = load(MODELS / "deepseek_v3").logits([1, 2, 3, 4])
    for activations in ("int8", "float"):
        found = load(tmp_path / "q", activations=activations).logits([1, 2, 3, 4])
        assert np.corrcoef(found.ravel(), wanted.ravel())[0, 1] > 0.999
