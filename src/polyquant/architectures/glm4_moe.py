"""GLM-4.5 and GLM-4.6 (2025): sigmoid router with a selection bias, a shared expert, leading dense layers; half of each
head rotates.

Some models have QK norms. A final multi-token prediction (MTP) layer is kept as `nextn` tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from polyquant.architectures.deepseek import SHARED_EXPERTS
from polyquant.architectures.hyper_table import USUAL, Key
from polyquant.architectures.keys import expert_keys, group_keys
from polyquant.architectures.llama import LLAMA_NAMES
from polyquant.architectures.mixture import Mixture
from polyquant.architectures.names import NameTable
from polyquant.architectures.parts import Attention, FeedForward, Layer
from polyquant.architectures.qwen_moe import EXPERTS
from polyquant.architectures.record import Architecture, Bias
from polyquant.gguf_values import u32

__all__ = ["GLM4_MOE"]


def _layers(get: Callable[..., Any]) -> Any:
    """Return the layer count without MTP layers: GGUF counts both."""
    count, predict = get("block_count"), get("nextn_predict_layers") or 0
    return count - predict if isinstance(count, int) and isinstance(predict, int) else count


GLM4_MOE = Architecture(
    name="glm4moe",
    model_type="glm4_moe",
    class_name="Glm4MoeForCausalLM",
    reads=("glm4_moe",),
    names=NameTable(
        {
            **LLAMA_NAMES,
            **SHARED_EXPERTS,
            "post_attention_layernorm": "post_attention_norm",
            "self_attn.q_norm": "attn_q_norm",
            "self_attn.k_norm": "attn_k_norm",
            "mlp.gate": "ffn_gate_inp",
            "eh_proj": "nextn.eh_proj",
            "enorm": "nextn.enorm",
            "hnorm": "nextn.hnorm",
            "embed_tokens": "nextn.embed_tokens",
            "shared_head.norm": "nextn.shared_head_norm",
            "shared_head.head": "nextn.shared_head_head",
        },
        exact={"mlp.gate.e_score_correction_bias": "exp_probs_b.bias"},
    ),
    moves=EXPERTS,
    hyper=replace(
        USUAL.changed(layers={"read_gguf": _layers}, rotated={"default": 0.5, "write": "always"}).plus(
            *expert_keys("n_routed_experts"),
            *group_keys(),
            Key("gating", (), "expert_gating_func", default=2),
            Key("predicted_layers", ("num_nextn_predict_layers",), "nextn_predict_layers", default=0, low=0),
        ),
        more_metadata=lambda hyper: {"block_count": u32(hyper.layers + hyper.count("predicted_layers"))},
    ),
    layer=Layer(
        Attention(head_norms=True, optional_norms=True),
        Mixture(
            FeedForward(norm="post_attention_norm"),
            norm="post_attention_norm",
            gating="sigmoid",
            eps=1e-20,
            group_score="top2",
            shared=True,
        ),
    ),
    biases=(Bias(("attn_q", "attn_k", "attn_v"), "attention_bias"),),
    switches={"use_qk_norm": lambda tensors: "blk.0.attn_k_norm.weight" in tensors},
)
