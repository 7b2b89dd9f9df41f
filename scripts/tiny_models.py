"""The models of make_tiny_models.py: sizes, and differences of hub checkpoints from transformers' output."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["TINY", "Tiny"]

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Tiny:
    """A tiny model.

    sizes: of the configuration class. added, removed: entries of config.json that differ from transformers' output.
    hub_style: use the keys of transformers 4. checkpoint: for code that is only on the hub, renames the tensors of the
    equivalent `model_class`; config.json is then `added`. plain_config: the converter reads config.json directly, since
    the version loaded by transformers 5 lacks keys that the converter needs. outtype: of the GGUF.
    """

    name: str
    model_class: str
    config_class: str
    sizes: Mapping[str, Any]
    added: Mapping[str, Any] = field(default_factory=dict)
    removed: tuple[str, ...] = ()
    hub_style: bool = True
    checkpoint: Callable[[Tensors, Any], Tensors] | None = None
    plain_config: bool = False
    outtype: str = "bf16"


SIZES = {
    "vocab_size": 384, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
GROUPED = {**SIZES, "num_key_value_heads": 2}


def rope(theta: float, **scaling: Any) -> dict[str, Any]:
    """Return rope_parameters of transformers 5."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **scaling}}


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


def _internlm2(state: Tensors, config: Any) -> Tensors:
    """Fuse q, k and v per key/value head: wqkv = [group][q.., k, v][head size]."""
    names = {
        "self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
        "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm", "embed_tokens": "tok_embeddings",
        "lm_head": "output",
    }  # fmt: skip
    groups, size = config.num_key_value_heads, config.hidden_size // config.num_attention_heads

    def fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        width = q.shape[-1]
        heads = [t.reshape(groups, -1, size, width) for t in (q, k, v)]
        return torch.cat(heads, dim=1).reshape(-1, width)

    return _fused(state, "attention.wqkv", fused, names)


def _baichuan(state: Tensors, config: Any) -> Tensors:
    return _fused(state, "self_attn.W_pack", lambda q, k, v: torch.cat((q, k, v)), {})


def _fused(state: Tensors, name: str, join: Callable[..., torch.Tensor], names: Mapping[str, str]) -> Tensors:
    """Join q, k and v under one name; rename other stems by the table."""
    out = {}
    for key, value in state.items():
        if key.endswith(("k_proj.weight", "v_proj.weight")):
            continue
        stem = key.partition("self_attn.")[0]
        if key.endswith("q_proj.weight"):
            out[f"{stem}{name}.weight"] = join(*(state[f"{stem}self_attn.{part}_proj.weight"] for part in "qkv"))
            continue
        new = key
        for old, other in names.items():
            new = new.replace(old, other)
        out[new] = value
    return out


def _hub(model_type: str, class_name: str, sizes: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """Return config.json of a model whose code is on the hub."""
    return {
        "architectures": [class_name],
        "model_type": model_type,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        **sizes,
        **more,
    }


_TINY = (
    Tiny(
        "gpt_neox", "GPTNeoXForCausalLM", "GPTNeoXConfig",
        {**SIZES, "use_parallel_residual": True, **rope(10000.0, partial_rotary_factor=0.5)},
        added={"rotary_pct": 0.5, "rotary_emb_base": 10000}, removed=("rope_theta", "attention_bias"),
        plain_config=True,
    ),
    Tiny(
        "exaone4", "Exaone4ForCausalLM", "Exaone4Config",
        {**GROUPED, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 3, "num_key_value_heads": 1,
        "head_dim": 16, "sliding_window": 8, "sliding_window_pattern": "LLLG",
         "layer_types": ["sliding_attention"] * 3 + ["full_attention"], "tie_word_embeddings": True,
         **rope(1000000.0, **LLAMA3)},
    ),
    Tiny(
        "internlm2", "LlamaForCausalLM", "LlamaConfig", {**GROUPED, **rope(1000000.0), "rms_norm_eps": 1e-5},
        checkpoint=_internlm2,
        added=_hub("internlm2", "InternLM2ForCausalLM", GROUPED, bias=False, rms_norm_eps=1e-05, rope_theta=1000000,
        rope_scaling={"type": "dynamic", "factor": 2.0}),
    ),
    Tiny(
        "baichuan", "LlamaForCausalLM", "LlamaConfig", {**SIZES, **rope(10000.0), "rms_norm_eps": 1e-6},
        checkpoint=_baichuan,
        added=_hub("baichuan", "BaichuanForCausalLM", SIZES, rms_norm_eps=1e-06, model_max_length=512),
    ),
    Tiny(
        "minicpm", "GraniteForCausalLM", "GraniteConfig",
        {**GROUPED, **rope(10000.0), "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "embedding_multiplier": 12,
        "residual_multiplier": 1.4 / 2**0.5,
         "logits_scaling": 48 / 24, "attention_multiplier": 12**-0.5},
        checkpoint=lambda state, config: {k: v for k, v in state.items() if k != "lm_head.weight"},
        added=_hub("minicpm", "MiniCPMForCausalLM", GROUPED, rms_norm_eps=1e-05, rope_scaling=None, scale_emb=12,
        dim_model_base=24, scale_depth=1.4),
        removed=("tie_word_embeddings",),
    ),
    Tiny(
        "hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", "HunYuanDenseV1Config",
        {**GROUPED, "head_dim": 16, "max_position_embeddings": 32768, "tie_word_embeddings": True,
         **rope(10000.0, rope_type="dynamic", alpha=1000.0, beta_fast=32, beta_slow=1, factor=1.0, mscale=1.0,
         mscale_all_dim=1.0)},
        added={"use_qk_norm": True, "num_experts": 1},
    ),
    Tiny(
        "cohere", "CohereForCausalLM", "CohereConfig",
        {**GROUPED, "max_position_embeddings": 256, "tie_word_embeddings": True, "use_qk_norm": True,
        "logit_scale": 0.25, **rope(8000000.0)},
        added={"model_max_length": 512},
    ),
    Tiny(
        "ernie4_5", "Ernie4_5ForCausalLM", "Ernie4_5Config",
        {**GROUPED, "head_dim": 16, "tie_word_embeddings": True, "rms_norm_eps": 1e-5, **rope(500000.0)},
    ),
    Tiny(
        "granitemoe", "GraniteMoeForCausalLM", "GraniteMoeConfig",
        {**GROUPED, "intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2,
        "tie_word_embeddings": True,
         "embedding_multiplier": 12.0, "logits_scaling": 6.0, "residual_multiplier": 0.22,
         "attention_multiplier": 0.125, **rope(10000.0)},
    ),
    Tiny(
        "granitemoeshared", "GraniteMoeSharedForCausalLM", "GraniteMoeSharedConfig",
        {**GROUPED, "intermediate_size": 32, "shared_intermediate_size": 48, "num_local_experts": 4,
        "num_experts_per_tok": 2, "tie_word_embeddings": True,
         "embedding_multiplier": 12.0, "logits_scaling": 6.0, "residual_multiplier": 0.22,
         "attention_multiplier": 0.125, **rope(10000.0)},
    ),
    Tiny(
        "seed_oss", "SeedOssForCausalLM", "SeedOssConfig",
        {**GROUPED, "head_dim": 16, "attention_bias": True, "attention_out_bias": False, **rope(10000000.0)},
        hub_style=False,
    ),
    Tiny(
        "olmo", "OlmoForCausalLM", "OlmoConfig",
        {**GROUPED, "tie_word_embeddings": True, "clip_qkv": 1.5, **rope(10000.0)},
    ),
    Tiny(
        "olmo3", "Olmo3ForCausalLM", "Olmo3Config",
        {**GROUPED, "intermediate_size": 64, "num_hidden_layers": 4, "sliding_window": 8, "tie_word_embeddings": False,
         "layer_types": ["sliding_attention"] * 3 + ["full_attention"], **rope(500000.0)},
    ),
    Tiny(
        "mistral", "MistralForCausalLM", "MistralConfig",
        {**GROUPED, "head_dim": 16, "sliding_window": None, "rms_norm_eps": 1e-5, **rope(1000000.0)},
    ),
)  # fmt: skip
TINY = {tiny.name: tiny for tiny in _TINY}
