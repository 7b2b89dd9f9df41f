"""Settings of config.json that GGUF cannot store: one warning each, none for reader defaults; and rejected models."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import polyquant
from architectures.golden_models import Golden
from polyquant.architectures import rope
from polyquant.architectures.translate import to_gguf, to_hf
from polyquant.errors import InputError, UnsupportedError
from polyquant.opening import open_checkpoint


def changed(name, folder, *, tensors=None, **entries):
    """A golden model with changed entries of config.json (None removes one) and changed tensors."""
    golden = Golden(name)
    folder.mkdir()
    for file in golden.folder.iterdir():
        if file.is_file():
            shutil.copy(file, folder)
    config = {**golden.config, **entries}
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))
    if tensors is not None:
        held = load_file(folder / "model.safetensors")
        save_file(tensors(held), folder / "model.safetensors", {"format": "pt"})
    return folder


LOST = {
    "another scale of attention": ("gemma2", {"query_pre_attn_scalar": 16}, "query_pre_attn_scalar"),
    "no caps": ("gemma2", {"attn_logit_softcapping": None}, "without score or logit capping"),
    "windows elsewhere": ("gemma3_text", {"layer_types": ["full_attention"] * 6}, "which layers have a sliding window"),
    "rotation everywhere": ("smollm3", {"no_rope_layers": [1, 1, 1, 1]}, "no_rope_layers"),
    "another interval": ("smollm3", {"no_rope_layers": ..., "no_rope_layer_interval": 2}, "no_rope_layers"),
    "weights that do not sum to 1": ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob"),
    "a window": ("starcoder2", {"sliding_window": 100}, "sliding_window 100"),
}


@pytest.mark.parametrize("name", LOST)
def test_losses_are_reported(name, tmp_path):
    model, entries, said = LOST[name]
    before = to_gguf(open_checkpoint(Golden(model).folder)).warnings
    assert not any(said in warning for warning in before)
    after = to_gguf(open_checkpoint(changed(model, tmp_path / "hf", **entries))).warnings
    assert sum(said in warning for warning in after) == 1


REFUSED = {
    "ALiBi": ("falcon", {"alibi": True}),
    "two norms": ("falcon", {"new_decoder_architecture": True}),
    "an encoder": ("gemma3_text", {"use_bidirectional_attention": True}),
    "norms of q and k": ("phi", {"qk_layernorm": True}),
    "residuals of the norm": ("bloom", {"apply_residual_connection_post_layernorm": True}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_variants_of_another_architecture_are_refused(name, tmp_path):
    model, entries = REFUSED[name]
    with pytest.raises(UnsupportedError, match=next(iter(entries))):
        to_gguf(open_checkpoint(changed(model, tmp_path / "hf", **entries)))


def test_the_largest_gemma_is_scaled_by_its_own_rule(tmp_path):
    said = {"num_hidden_layers": 46, "query_pre_attn_scalar": 16, "layer_types": ...}  # hidden 64, 4 heads
    found = to_gguf(open_checkpoint(changed("gemma2", tmp_path / "hf", **said)))
    assert not any("query_pre_attn_scalar" in w for w in found.warnings)


def test_a_non_default_rope_base_is_written(tmp_path):
    found = to_gguf(open_checkpoint(changed("gemma", tmp_path / "hf", rope_theta=50000.0)))
    assert found.metadata["gemma.rope.freq_base"].value == 50000.0


def test_norms_of_single_heads_are_stacked_and_round_trip(tmp_path):
    def with_norms(tensors):
        rng = np.random.default_rng(0)
        new = {
            f"model.layers.{i}.self_attn.{x}_layernorm.norms.{e}.weight": rng.standard_normal(32).astype(np.float32)
            for i in range(2)
            for x in "qk"
            for e in range(4)
        }
        return {**{n: t for n, t in tensors.items() if "post_attention" not in n}, **new}

    entries = {"qk_layernorm": True, "use_parallel_residual": True}
    folder = changed("stablelm", tmp_path / "hf", tensors=with_norms, **entries)
    polyquant.convert(folder, tmp_path / "m.gguf", to="gguf", codec="f32")
    assert open_checkpoint(tmp_path / "m.gguf")["blk.1.attn_q_norm.weight"].shape == (4, 32)
    polyquant.convert(tmp_path / "m.gguf", tmp_path / "back", to="hf", codec="f32")
    ours, wanted = open_checkpoint(tmp_path / "back"), open_checkpoint(folder)
    assert set(ours) == set(wanted)
    assert all(np.array_equal(ours[n].dequantize(), wanted[n].dequantize()) for n in wanted)
    assert {k: ours.config[k] for k in entries} == entries


def test_a_missing_scalar_of_a_layer_is_an_error(tmp_path):
    name = "model.layers.1.mlp.act_fn.beta"
    folder = changed("apertus", tmp_path / "hf", tensors=lambda held: {n: t for n, t in held.items() if n != name})
    with pytest.raises(InputError, match="lacks this scalar"):
        to_gguf(open_checkpoint(folder))


@pytest.mark.parametrize("kind", ["longrope", "su"])
def test_longrope_with_an_explicit_factor(kind, tmp_path):
    scaling = {**Golden("phi3").config["rope_scaling"], "type": kind, "attention_factor": 1.5}
    folder = changed("phi3", tmp_path / "hf", rope_scaling=scaling)
    polyquant.convert(folder, tmp_path / "m.gguf", to="gguf", codec="f32")
    gguf = open_checkpoint(tmp_path / "m.gguf")
    assert gguf.metadata["phi3.rope.scaling.attn_factor"] == 1.5
    said = json.loads(to_hf(gguf).files["config.json"])["rope_parameters"]
    assert {k: said[k] for k in ("attention_factor", "long_factor", "short_factor")} == {
        k: scaling[k] for k in ("attention_factor", "long_factor", "short_factor")
    }
    assert said["rope_type"] == "longrope" and said["original_max_position_embeddings"] == 4096


@pytest.mark.parametrize("wrong", [[1.0, 2.0], "1.0", None, [True] * 8])
def test_longrope_factors_of_the_wrong_length(wrong, tmp_path):
    scaling = {**Golden("phi3").config["rope_scaling"], "short_factor": wrong}
    with pytest.raises(InputError, match="short_factor"):
        to_gguf(open_checkpoint(changed("phi3", tmp_path / "hf", rope_scaling=scaling)))


def test_partial_rotary_factor_becomes_the_dimension_count_again():
    for head in range(2, 300):
        for count in range(2, head + 1, 2):
            assert int(head * rope.share(count, head)) == count
