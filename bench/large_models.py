"""Folders with the real shapes of large models, whose weights are holes in sparse files: they plan, but hold no values.

python bench/large_models.py kimi-k2 FOLDER      69,663 tensors, 2 TB claimed, a few MB on disk
"""

from __future__ import annotations

import json
import math
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

SHARD = 10_000_000_000
"""Bytes from which on a tensor goes to the next file."""

LLAMA_405B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}
KIMI_K2 = {
    **DEEPSEEK_V3,
    "first_k_dense_replace": 1,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_routed_experts": 384,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.827,
    "vocab_size": 163840,
    "max_position_embeddings": 131072,
    "rope_theta": 50000.0,
}
MOE_1600B = {**KIMI_K2, "n_routed_experts": 600}
"""The layers of Kimi-K2 with 600 experts instead of 384."""


def llama_shapes(config: dict) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of each tensor of a Llama."""
    h, f = config["hidden_size"], config["intermediate_size"]
    kv = config["head_dim"] * config["num_key_value_heads"]
    yield "model.embed_tokens.weight", (config["vocab_size"], h)
    for i in range(config["num_hidden_layers"]):
        p = f"model.layers.{i}."
        yield p + "input_layernorm.weight", (h,)
        yield p + "post_attention_layernorm.weight", (h,)
        for name, shape in (("q", (h, h)), ("k", (kv, h)), ("v", (kv, h)), ("o", (h, h))):
            yield f"{p}self_attn.{name}_proj.weight", shape
        for name, shape in (("gate", (f, h)), ("up", (f, h)), ("down", (h, f))):
            yield f"{p}mlp.{name}_proj.weight", shape
    yield "model.norm.weight", (h,)
    yield "lm_head.weight", (config["vocab_size"], h)


def deepseek_shapes(config: dict) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of each tensor of a model with DeepSeek-V3's layers."""
    h, heads = config["hidden_size"], config["num_attention_heads"]
    nope, rope, value = (config[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    q, kv = config["q_lora_rank"], config["kv_lora_rank"]
    yield "model.embed_tokens.weight", (config["vocab_size"], h)
    for i in range(config["num_hidden_layers"]):
        p = f"model.layers.{i}."
        yield p + "input_layernorm.weight", (h,)
        yield p + "post_attention_layernorm.weight", (h,)
        yield p + "self_attn.q_a_proj.weight", (q, h)
        yield p + "self_attn.q_a_layernorm.weight", (q,)
        yield p + "self_attn.q_b_proj.weight", (heads * (nope + rope), q)
        yield p + "self_attn.kv_a_proj_with_mqa.weight", (kv + rope, h)
        yield p + "self_attn.kv_a_layernorm.weight", (kv,)
        yield p + "self_attn.kv_b_proj.weight", (heads * (nope + value), kv)
        yield p + "self_attn.o_proj.weight", (h, heads * value)
        if i < config["first_k_dense_replace"]:
            yield from _gated(p + "mlp.", h, config["intermediate_size"])
            continue
        yield p + "mlp.gate.weight", (config["n_routed_experts"], h)
        yield p + "mlp.gate.e_score_correction_bias", (config["n_routed_experts"],)
        yield from _gated(p + "mlp.shared_experts.", h, config["moe_intermediate_size"])
        for e in range(config["n_routed_experts"]):
            yield from _gated(f"{p}mlp.experts.{e}.", h, config["moe_intermediate_size"])
    yield "model.norm.weight", (h,)
    yield "lm_head.weight", (config["vocab_size"], h)


def _gated(prefix: str, hidden: int, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, shape in (("gate", (width, hidden)), ("up", (width, hidden)), ("down", (hidden, width))):
        yield f"{prefix}{name}_proj.weight", shape


def write_sparse(folder: Path, config: dict, shapes: Iterator[tuple[str, tuple[int, ...]]]) -> int:
    """Write config.json, an index and sparse safetensors files in bf16; returns the number of tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    size = total = 0
    for name, shape in shapes:
        if size > SHARD:
            shards.append({})
            size = 0
        shards[-1][name] = shape
        size += 2 * math.prod(shape)
        total += 2 * math.prod(shape)
    files = {}
    for i, tensors in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        header, offset = {}, 0
        for name, shape in tensors.items():
            end = offset + 2 * math.prod(shape)
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]}
            offset = end
            files[name] = file
        text = json.dumps(header).encode()
        with (folder / file).open("wb") as f:
            f.write(struct.pack("<Q", len(text)) + text)
            f.truncate(8 + len(text) + offset)
    index = {"metadata": {"total_size": total}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return len(files)


MODELS = {
    "llama-405b": (LLAMA_405B, llama_shapes),
    "deepseek-v3": (DEEPSEEK_V3, deepseek_shapes),
    "kimi-k2": (KIMI_K2, deepseek_shapes),
    "moe-1.6t": (MOE_1600B, deepseek_shapes),
}


def write_model(name: str, folder: Path) -> int:
    """Write one of MODELS; returns the number of tensors."""
    config, shapes = MODELS[name]
    return write_sparse(folder, config, shapes(config))


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in MODELS:
        sys.exit(__doc__)
    print(f"{write_model(sys.argv[1], Path(sys.argv[2])):,} tensors")
