"""DeepSeek-V2, DeepSeek-V3 and R1 (DeepSeek-AI 2024): latent attention (MLA), grouped routing, shared experts.

Both are `deepseek2` in GGUF. V3's router is a sigmoid with a bias that affects only the selection.

Keys and values of a head are K_b c and V_b c of a shared latent c = norm(A x) [kv_lora], plus one rotated key shared by
all heads. GGUF holds K_b transposed, so that it can be absorbed into the queries: q K_b c = (K_b^T q) c. Its key_length
and value_length are those of the attention over c, with a single key head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from polyquant.architectures.hyper import Hyper
from polyquant.architectures.hyper_table import USUAL, Key
from polyquant.architectures.keys import expert_keys, gating_key, group_keys
from polyquant.architectures.latent import KV_B, LatentAttention
from polyquant.architectures.llama import LLAMA_NAMES
from polyquant.architectures.mixture import Mixture
from polyquant.architectures.names import NameTable
from polyquant.architectures.parts import Layer
from polyquant.architectures.qwen_moe import EXPERTS
from polyquant.architectures.record import Architecture, Bias
from polyquant.gguf_values import u32
from polyquant.types import Meta

__all__ = ["DEEPSEEK_V2", "DEEPSEEK_V3", "SHARED_EXPERTS"]

SHARED_EXPERTS = {f"mlp.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")}
_NAMES = {
    **{hf: gguf for hf, gguf in LLAMA_NAMES.items() if gguf not in ("attn_k", "attn_v")},
    **SHARED_EXPERTS,
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",  # not split in GGUF files from before 2025
    "mlp.gate": "ffn_gate_inp",
}


def _nope(get: Callable[..., Any]) -> Any:
    """Return the unrotated dimensions of a head's keys."""
    key_length, rope = get("attention.key_length_mla", "attention.key_length"), get("rope.dimension_count")
    return key_length - rope if isinstance(key_length, int) and isinstance(rope, int) else None


def _lengths(hyper: Hyper) -> Mapping[str, Meta]:
    lora, rope = hyper.count("kv_lora"), hyper.head_size
    return {
        "attention.head_count_kv": u32(1),
        "attention.key_length": u32(lora + rope),
        "attention.value_length": u32(lora),
        "attention.key_length_mla": u32(hyper.count("nope_head") + rope),
    }


def _config(hyper: Hyper) -> Mapping[str, Any]:
    limited = hyper.count("expert_groups") > 1
    topk = "noaux_tc" if hyper.count("gating") == 2 else "group_limited_greedy" if limited else "greedy"
    return {"num_key_value_heads": hyper.heads, "topk_method": topk}


_TABLE = USUAL.changed(
    kv_heads={"config": (), "gguf": None},
    head_dim={"config": ("qk_rope_head_dim",), "gguf": None, "default": 64,
        "read_gguf": lambda get: get("rope.dimension_count")},
    vocab={"write": "always"},
    rotated={"config": (), "write": "always"},
).plus(
    Key("rope_head", (), default="head_dim"),
    Key("nope_head", ("qk_nope_head_dim",), default=128, read_gguf=_nope),
    Key("value_head", ("v_head_dim",), "attention.value_length_mla", aliases=("attention.value_length",), default=128),
    Key("q_lora", ("q_lora_rank",), "attention.q_lora_rank", default=0, low=0, write="where set",
        entries=lambda n: {"q_lora_rank": n or None}),
    Key("kv_lora", ("kv_lora_rank",), "attention.kv_lora_rank", default=512),
    *expert_keys("n_routed_experts"),
    *group_keys(),
)  # fmt: skip

DEEPSEEK_V2 = Architecture(
    name="deepseek2",
    model_type="deepseek_v2",
    class_name="DeepseekV2ForCausalLM",
    reads=("deepseek_v2",),
    names=NameTable(_NAMES, exact={"mlp.gate.e_score_correction_bias": "exp_probs_b.bias"}),
    moves=(*EXPERTS, KV_B),
    hyper=replace(_TABLE.plus(gating_key()), yarn_log=0.1, more_metadata=_lengths, more_config=_config),
    layer=Layer(LatentAttention(), Mixture(shared=True)),
    pairs=True,
    biases=(Bias(("attn_kv_a_mqa", "attn_q_a", "attn_output"), "attention_bias"),),
    beyond_last="a multi-token prediction (MTP) layer, which deepseek2 does not run",
)
DEEPSEEK_V3 = replace(
    DEEPSEEK_V2,
    model_type="deepseek_v3",
    class_name="DeepseekV3ForCausalLM",
    reads=("deepseek_v3",),
    gguf_requires=("expert_gating_func=2",),
    layer=Layer(LatentAttention(), Mixture(shared=True, gating="sigmoid", eps=1e-20, group_score="top2")),
    hyper=replace(
        DEEPSEEK_V2.hyper,
        keys=(*_TABLE.keys, gating_key(default="sigmoid")),
        written={"num_nextn_predict_layers": 0, "rope_interleave": True},
    ),
)
