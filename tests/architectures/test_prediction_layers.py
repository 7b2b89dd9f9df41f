"""Multi-token prediction (MTP) layers after the last layer.

GLM-4.5 keeps them in GGUF, DeepSeek-V3 and ERNIE omit them. Also DeepSeek files from before the split of kv_b_proj.
"""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import polyquant
from architectures.golden_models import Golden
from polyquant.architectures.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from polyquant.architectures.find import of_metadata
from polyquant.architectures.tensors import hf_maps
from polyquant.types import Weight

OWN = (
    "eh_proj.weight",
    "enorm.weight",
    "hnorm.weight",
    "shared_head.norm.weight",
    "shared_head.head.weight",
    "embed_tokens.weight",
)


def with_prediction_layer(name, path):
    """A copy of a golden model in one file, plus a copy of its last layer and the rest of a prediction layer."""
    golden = Golden(name)
    shutil.copytree(golden.folder, path, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors = {}
    for file in sorted(golden.folder.glob("*.safetensors")):
        tensors |= load_file(file)
    layers = golden.config["num_hidden_layers"]
    last = {n: a for n, a in tensors.items() if n.startswith(f"model.layers.{layers - 1}.")}
    tensors |= {n.replace(f".{layers - 1}.", f".{layers}.", 1): a for n, a in last.items()}
    rng = np.random.default_rng(0)
    for inside in OWN:
        shape = (64,) if "norm" in inside else (64, 128) if "eh" in inside else tensors["lm_head.weight"].shape
        tensors[f"model.layers.{layers}.{inside}"] = rng.standard_normal(shape).astype(tensors["lm_head.weight"].dtype)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = {**golden.config, "num_nextn_predict_layers": 1}
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return path, layers


def test_glm_keeps_its_prediction_layer(tmp_path):
    source, layers = with_prediction_layer("glm4_moe", tmp_path / "hf")
    polyquant.convert(source, tmp_path / "m.gguf", to="gguf")
    gguf = polyquant.open(tmp_path / "m.gguf")
    assert gguf.metadata["glm4moe.block_count"] == layers + 1 and gguf.metadata["glm4moe.nextn_predict_layers"] == 1
    assert gguf[f"blk.{layers}.nextn.eh_proj.weight"].shape == (64, 128)
    assert f"blk.{layers}.nextn.shared_head_head.weight" in gguf and f"blk.{layers}.ffn_gate_exps.weight" in gguf
    polyquant.convert(tmp_path / "m.gguf", tmp_path / "back", to="hf")
    back, wanted = polyquant.open(tmp_path / "back"), polyquant.open(source)
    assert set(back) == set(wanted)
    assert all(np.array_equal(back[n].dequantize(), wanted[n].dequantize()) for n in wanted)
    assert (back.config["num_hidden_layers"], back.config["num_nextn_predict_layers"]) == (layers, 1)


def test_deepseek_omits_the_prediction_layer(tmp_path):
    source, layers = with_prediction_layer("deepseek_v3", tmp_path / "hf")
    plan = polyquant.plan(source, "gguf")
    dropped = [n for n in plan.translation.dropped if n.startswith(f"model.layers.{layers}.")]
    assert len(dropped) > len(OWN) and all("MTP" in plan.translation.dropped[n] for n in dropped)
    assert not [s for s in plan.steps if s.map.target.startswith(f"blk.{layers}.")]
    assert not [w for w in plan.warnings if "not part of architecture" in w]


def test_ernie_omits_prediction_layers(tmp_path):
    golden = Golden("ernie4_5_moe")
    shutil.copytree(golden.folder, tmp_path / "hf")
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    tensors["model.mtp_linear_proj.0.weight"] = np.ones((64, 128), np.float32)
    save_file(tensors, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    plan = polyquant.plan(tmp_path / "hf", "gguf")
    assert set(plan.translation.dropped) >= {"model.mtp_linear_proj.0.weight"}


@pytest.mark.parametrize(("gating", "record"), [(1, DEEPSEEK_V2), (2, DEEPSEEK_V3), (None, DEEPSEEK_V2)])
def test_deepseek2_files_are_distinguished_by_their_gating(gating, record):
    said = {} if gating is None else {"deepseek2.expert_gating_func": gating}
    assert of_metadata({"general.architecture": "deepseek2", **said}) is record


def test_deepseek_files_with_unsplit_kv_b():
    """key_length and value_length are those of a head, and attn_kv_b is kv_b_proj as it was."""
    said = {
        "block_count": 2, "embedding_length": 32, "feed_forward_length": 64, "attention.head_count": 2,
        "attention.head_count_kv": 2,
        "attention.key_length": 48, "attention.value_length": 24, "rope.dimension_count": 16,
        "attention.kv_lora_rank": 8,
    }  # fmt: skip
    hyper = DEEPSEEK_V2.hyper.read_metadata(
        {f"deepseek2.{k}": v for k, v in said.items()}, "deepseek2", vocab=40, tied=False
    )
    assert (hyper.count("nope_head"), hyper.count("rope_head"), hyper.count("value_head")) == (32, 16, 24)
    whole = Weight("blk.0.attn_kv_b.weight", (2 * 56, 8), polyquant.codec("f32"), {})
    (made,) = hf_maps([whole], DEEPSEEK_V2, hyper, None).maps
    assert made.target == "model.layers.0.self_attn.kv_b_proj.weight" and made.shape == (112, 8)
