"""Multimodal models of transformers: the language model's logits match, from the folder and from GGUF."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

import polyquant as pq
from architectures.golden_models import Golden

pytestmark = pytest.mark.slow
SIGHT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
LLAMA4 = {
    "hidden_size": 32,
    "intermediate_size": 128,
    "vision_output_dim": 32,
    "projector_input_dim": 32,
    "projector_output_dim": 32,
}


def text(name, *without):
    dropped = ("architectures", "model_type", *without)
    return {k: v for k, v in Golden(name).config.items() if k not in dropped}


def gemma3(t):
    inner = t.Gemma3TextConfig(**text("gemma3_text"))
    config = t.Gemma3Config(text_config=inner, vision_config=t.SiglipVisionConfig(**SIGHT), mm_tokens_per_image=4)
    return t.Gemma3ForConditionalGeneration(config)


def llama4(t):
    seen = t.Llama4VisionConfig(**{**SIGHT, **LLAMA4})
    config = t.Llama4Config(text_config=t.Llama4TextConfig(**text("llama4")), vision_config=seen)
    return t.Llama4ForConditionalGeneration(config)


def mistral3(t):
    inner = t.MistralConfig(
        **text("llama3", "rope_scaling", "rope_parameters", "torch_dtype", "dtype"), sliding_window=None
    )
    config = t.Mistral3Config(text_config=inner, vision_config=t.PixtralVisionConfig(**SIGHT, head_dim=16))
    return t.Mistral3ForConditionalGeneration(config)


def qwen3_5_moe(t):
    inner = text("qwen3_5_moe")
    seen = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": inner["hidden_size"],
    }
    config = t.Qwen3_5MoeConfig(text_config=inner, vision_config={**seen, "deepstack_visual_indexes": []})
    return t.Qwen3_5MoeForConditionalGeneration(config)


@pytest.mark.parametrize(
    ("make", "tokenizer"),
    [(gemma3, "gemma3_text"), (llama4, "llama4"), (mistral3, "llama3"), (qwen3_5_moe, "qwen3_5_moe")],
)
def test_logits_of_nested_language_models_equal_transformers(make, tokenizer, tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = make(transformers).eval().float()
    model.save_pretrained(tmp_path / "model")
    for path in Golden(tokenizer).folder.glob("tokenizer*"):
        shutil.copy(path, tmp_path / "model")
    tokens = torch.arange(5, 29)[None]
    with torch.no_grad():
        wanted = model(input_ids=tokens).logits[0].numpy()
    pq.convert(tmp_path / "model", tmp_path / "model.gguf", to="gguf", codec="f32")
    for path in (tmp_path / "model", tmp_path / "model.gguf"):
        found = pq.load(path, activations="float").logits(tokens[0].tolist())
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4 * np.abs(wanted).max())
