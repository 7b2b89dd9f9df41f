"""Multimodal folders: the language model inside converts and runs as it does from a folder without the other parts."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

import polyquant as pq
from architectures.golden_models import Golden, differences
from polyquant.storage import safetensors
from polyquant.storage.source import Source

SPELLINGS = {
    "older": lambda n: f"language_model.{n}",
    "newer": lambda n: n.replace("model.", "model.language_model.", 1) if n.startswith("model.") else n,
}
TOWERS = (
    "vision_tower.encoder.layers.0.self_attn.q_proj.weight",
    "multi_modal_projector.linear_1.weight",
    "model.visual.patch.weight",
)


def nested(golden, out, spelled, *, drop=(), **entries):
    """The folder as part of a multimodal model.

    drop: entries of the language model's configuration that are not written.
    """
    out.mkdir()
    inner = {k: v for k, v in golden.config.items() if k not in ("architectures", *drop)}
    whole = {
        "architectures": ["SomeForConditionalGeneration"],
        "model_type": "some_vlm",
        "text_config": inner,
        "vision_config": {"hidden_size": 8},
    }
    (out / "config.json").write_text(json.dumps({**whole, **entries}))
    for path in golden.folder.glob("tokenizer*"):
        (out / path.name).write_bytes(path.read_bytes())
    tensors = {}
    for path in sorted(golden.folder.glob("*.safetensors")):
        header, raw = safetensors.read_header(Source(path)), path.read_bytes()
        for name, entry in header.entries.items():
            assert entry.dtype == "BF16"
            bits = np.frombuffer(raw, np.uint16, offset=entry.offset, count=entry.nbytes // 2)
            tensors[spelled(name)] = (bits.astype(np.uint32) << 16).view(np.float32).reshape(entry.shape)
    tensors |= {name: np.ones((8, 8), np.float32) for name in TOWERS}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("name", ["gemma3_text", "llama4", "qwen3_5_moe", "gemma4"])
def test_nested_language_model_equals_its_separate_folder(name, spelling, tmp_path):
    golden = Golden(name)
    folder = nested(golden, tmp_path / "model", SPELLINGS[spelling])
    plan = pq.plan(folder, "gguf", codec="bf16")
    assert any("3 tensors are not part of the language model" in w and "first: " in w for w in plan.warnings)
    for source, out in ((folder, "nested"), (golden.folder, "plain")):
        pq.convert(source, tmp_path / f"{out}.gguf", to="gguf", codec="bf16")
    one, two = pq.open(tmp_path / "nested.gguf"), pq.open(tmp_path / "plain.gguf")
    said = [{k: v for k, v in file.metadata.items() if k != "general.name"} for file in (one, two)]
    assert said[0] == said[1]
    assert list(one) == list(two)
    for tensor in one:
        np.testing.assert_array_equal(one[tensor].dequantize(), two[tensor].dequantize(), err_msg=tensor)
    tokens = golden.logits()["tokens"].tolist()
    a, b = (pq.load(path, activations="float").logits(tokens) for path in (folder, golden.folder))
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())


def test_defaults_of_the_transformers_class_may_be_omitted(tmp_path):
    """Gemma 3's config.json on the hub has few entries for its language model."""
    golden = Golden("gemma3_text")
    silent = ("rms_norm_eps", "hidden_activation", "query_pre_attn_scalar", "head_dim", "attention_bias")
    folder = nested(
        golden, tmp_path / "model", SPELLINGS["older"], drop=(*silent, "num_attention_heads", "num_key_value_heads")
    )
    hyper = pq.plan(Golden("gemma3_text").folder, "gguf").translation.metadata
    assert hyper["gemma3.attention.head_count"].value != 8  # so that the next value can only be the default
    with pytest.raises(pq.PolyquantError, match=r"q_proj|attn_q|shape"):
        pq.load(folder).logits([1, 2, 3])
    found = pq.plan(folder, "gguf", allow_unknown=True).translation.metadata
    assert (found["gemma3.attention.head_count"].value, found["gemma3.attention.head_count_kv"].value) == (8, 4)


def test_unknown_nested_models_are_rejected_by_name(tmp_path):
    golden = Golden("gemma3_text")
    folder = nested(golden, tmp_path / "model", SPELLINGS["older"])
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["model_type"] = "nobody_text"
    (folder / "config.json").write_text(json.dumps(config))
    for refused in (lambda: pq.plan(folder, "gguf"), lambda: pq.load(folder)):
        with pytest.raises(pq.PolyquantError, match="some_vlm"):
            refused()


def test_a_folder_of_only_the_language_model_is_accepted(tmp_path):
    golden = Golden("gemma3_text")
    gguf = golden.to_gguf(tmp_path / "model.gguf")
    assert differences(golden, gguf) == []
    assert not any("language model" in w for w in pq.plan(golden.folder, "gguf").warnings)
