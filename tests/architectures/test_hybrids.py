"""Alternative configurations of hybrids and encoders, properties that GGUF cannot store, and fused experts."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import save_file

import polyquant
from architectures.golden_models import Golden, differences
from polyquant.architectures.find import by_name, of_config, of_metadata
from polyquant.errors import InputError, UnsupportedError
from polyquant.formats.smoothing import links
from polyquant.opening import open_checkpoint
from polyquant.runtime.load import load

CONFIGS = {
    "a letter for each layer": ("nemotron_h", {"layers_block_type": None, "hybrid_override_pattern": "ME*EM"}),
    "the names before transformers 5": ("nemotron_h",
        {"layers_block_type": ["mamba", "moe", "attention", "moe", "mamba"]}),
    "numbers of the layers with attention": ("lfm2", {"layer_types": None, "full_attn_idxs": [1, 3]}),
    "a width that is rounded up": ("lfm2",
        {"intermediate_size": 180, "block_auto_adjust_ff_dim": True, "block_multiple_of": 64}),
    "its first name": ("lfm2", {"intermediate_size": 7, "block_ff_dim": 128}),
    "the names of transformers 5": ("granitemoehybrid", {"layer_types": ["linear_attention", "full_attention"] * 2}),
    "a head that fills the width": ("granitemoehybrid", {"mamba_d_head": "auto"}),
    "each fourth layer": ("qwen3_next", {"layer_types": None, "full_attention_interval": 4}),
    "kinds of layers alone": ("modernbert", {"global_attn_every_n_layers": None}),
    "bases of the years before transformers 5": ("modernbert", {"rope_parameters": None}),
    "bases since then": ("modernbert", {"global_rope_theta": None, "local_rope_theta": None}),
}  # fmt: skip


@pytest.mark.parametrize("case", CONFIGS)
def test_equivalent_configurations(case):
    name, other = CONFIGS[case]
    config = Golden(name).config
    record = of_config(config)
    changed = {k: v for k, v in {**config, **other}.items() if v is not None}
    assert of_config(changed) is record
    assert record.hyper.read_config(changed, vocab=384) == record.hyper.read_config(config, vocab=384)


def test_the_context_of_nomic_is_the_trained_length():
    table = by_name("nomic-bert").hyper
    said = {
        "n_layer": 12,
        "n_embd": 768,
        "n_inner": 3072,
        "n_head": 12,
        "vocab_size": 30528,
        "rotary_emb_base": 1000,
        "layer_norm_epsilon": 1e-12,
    }
    found = table.read_config({**said, "n_positions": 8192})
    assert (found.context, found.rope_theta, found.layers, found.feed_forward) == (2048, 1000.0, 12, 3072)
    for other in (
        {"activation_function": "gelu"},
        {"prenorm": True},
        {"qkv_proj_bias": True},
        {"moe_every_n_layers": 2},
    ):
        with pytest.raises(UnsupportedError):
            table.read_config({**said, "n_positions": 8192, **other})


@pytest.mark.parametrize(
    ("name", "said", "word"),
    [
        ("lfm2_moe", {"routed_scaling_factor": 2.5}, "routed_scaling_factor = 2.5"),
        ("qwen3_next", {"norm_topk_prob": False}, "norm_topk_prob = False"),
        ("falcon_h1", {"mamba_rms_norm": True, "mamba_norm_before_gate": True}, "mamba_norm_before_gate"),
        ("falcon_h1", {"tie_word_embeddings": True}, "cannot store two factors"),
    ],
)
def test_settings_missing_in_gguf_are_a_warning(name, said, word):
    config = Golden(name).config
    table = of_config(config).hyper
    assert table.to_metadata(table.read_config(config))[1] == ()
    (warning,) = table.to_metadata(table.read_config({**config, **said}))[1]
    assert word in warning and "\n" not in warning


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("falcon_h1", {"projectors_bias": True}),
        ("qwen3_next", {"mlp_only_layers": [0]}),
        ("bert", {"position_embedding_type": "relative_key"}),
    ],
)
def test_unsupported_variants_are_refused(name, said):
    config = Golden(name).config
    with pytest.raises(UnsupportedError):
        of_config(config).hyper.read_config({**config, **said})


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nemotron_h", {"layers_block_type": "ME*EM"}),
        ("nemotron_h", {"layers_block_type": ["moe", 3]}),
        ("granitemoehybrid", {"layer_types": None}),
        ("mamba2", {"head_dim": None}),
        ("mamba2", {"num_heads": "8"}),
        ("lfm2", {"block_auto_adjust_ff_dim": True, "block_multiple_of": 0}),
        ("modernbert", {"local_attention": 0}),
    ],
)
def test_invalid_configurations(name, said):
    config = Golden(name).config
    with pytest.raises(InputError):
        of_config(config).hyper.read_config({**config, **said})


def test_indivisible_heads_are_refused():
    config = Golden("qwen3_next").config
    record = of_config(config)
    hyper = record.hyper.read_config({**config, "linear_num_value_heads": 3})
    move = next(m for m in record.moves if m.source.endswith("qkvz.weight"))
    for make in move.targets.values():
        with pytest.raises(InputError, match="divide"):
            make(hyper, (192, 64))


def test_files_with_and_without_experts_are_distinguished():
    assert of_metadata({"general.architecture": "granitehybrid", "granitehybrid.expert_count": 4}).moves != ()
    with_none = of_metadata({"general.architecture": "granitehybrid", "granitehybrid.expert_count": 0})
    assert with_none is of_metadata({"general.architecture": "granitehybrid"})
    assert with_none is of_config({"model_type": "granitemoehybrid", "num_local_experts": 0})
    assert of_config({"model_type": "nemotron_h", "num_experts_per_tok": 2}).name == "nemotron_h_moe"
    assert of_config({"model_type": "nemotron_h"}).name == "nemotron_h"


def test_fused_and_separate_experts_give_the_same_file(tmp_path):
    golden = Golden("qwen3_5_moe")
    fused = tmp_path / golden.name.replace("_", "-")
    shutil.copytree(golden.folder, fused)
    tensors = {name: weight.dequantize() for name, weight in open_checkpoint(golden.folder).items()}
    for layer in range(4):
        stem = f"model.layers.{layer}.mlp.experts"
        parts = {
            p: np.stack([tensors.pop(f"{stem}.{e}.{p}_proj.weight") for e in range(6)]) for p in ("gate", "up", "down")
        }
        tensors[f"{stem}.gate_up_proj"] = np.concatenate([parts["gate"], parts["up"]], axis=1)
        tensors[f"{stem}.down_proj"] = parts["down"]
    save_file(tensors, fused / "model.safetensors", {"format": "pt"})
    config = json.loads((fused / "config.json").read_text())
    assert of_config(config).name == "qwen35moe"
    target = tmp_path / "model.gguf"
    polyquant.convert(fused, target, to="gguf", codec=golden.codec)
    assert differences(golden, target) == []


def test_each_layer_of_a_hybrid_is_smoothed_by_its_parts(tmp_path):
    """8-bit weights with floats between them stay close to the model, also after smoothing its norms."""
    for name, norms in (("lfm2", 8), ("mamba2", 3), ("granitemoehybrid", 4)):
        golden = Golden(name)
        source, wanted = open_checkpoint(golden.folder), golden.logits()
        found = links(source, "m4")
        assert len({link.feeder for link in found if link.norm}) == norms
        samples = tmp_path / "samples.json"
        samples.write_text(json.dumps(np.random.default_rng(0).integers(0, 384, (8, 32)).tolist()))
        out = tmp_path / name
        polyquant.quantize(golden.folder, out, to="msmodelslim", codec="w8a16", smooth="m4", calibration=samples)
        logits = load(out, activations="float").logits(wanted["tokens"].tolist())
        assert np.corrcoef(logits.ravel(), wanted["hf_torch"].ravel())[0, 1] > 0.999
        norm = next(link.feeder for link in found if link.norm)
        assert not np.array_equal(open_checkpoint(out)[norm].dequantize(), source[norm].dequantize())


def test_c8_scales_exist_only_for_attention_layers(tmp_path):
    golden, samples = Golden("lfm2"), tmp_path / "samples.json"
    samples.write_text(json.dumps(np.random.default_rng(0).integers(0, 384, (8, 32)).tolist()))
    polyquant.quantize(golden.folder, tmp_path / "c8", to="msmodelslim", codec="w8a16", kv="c8", calibration=samples)
    assert not [found for found in polyquant.validate(tmp_path / "c8") if found.code == "ASC040"]
    model, wanted = load(tmp_path / "c8"), golden.logits()
    assert model.decoder.cache_type == "c8"
    assert [grid is None for grid in model.decoder.grids] == [True, False, True, False]
    session = model.session()
    found = np.array([session.feed([token]) for token in wanted["tokens"].tolist()])
    assert np.corrcoef(found.ravel(), wanted["hf_torch"].ravel())[0, 1] > 0.99


def test_limits_of_time_steps_are_refused(tmp_path):
    folder = tmp_path / "mamba2"
    shutil.copytree(Golden("mamba2").folder, folder)
    said = json.loads((folder / "config.json").read_text())
    for limit in ([0.001, 0.1], [0.0, 0.1], [0.001, {"__float__": "Infinity"}]):
        (folder / "config.json").write_text(json.dumps({**said, "time_step_limit": limit}))
        with pytest.raises(UnsupportedError, match="limit"):
            load(folder)


def test_indivisible_heads_of_a_mixer_are_refused(tmp_path):
    folder = tmp_path / "mamba2"
    shutil.copytree(Golden("mamba2").folder, folder)
    said = json.loads((folder / "config.json").read_text())
    for wrong in ({"n_groups": 3}, {"num_heads": 7}, {"conv_kernel": 3}, {"state_size": 16}, {"conv_kernel": 0}):
        (folder / "config.json").write_text(json.dumps({**said, **wrong}))
        with pytest.raises(InputError):
            load(folder)
