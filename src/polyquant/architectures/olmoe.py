"""OLMoE (Muennighoff et al. 2024): a mixture of small experts with full-width QK norms. Selected weights are not
normalized to sum to 1.

h = x + O attention(rope(norm(Q n)), rope(norm(K n)), V n), n = norm(x)
"""

from __future__ import annotations

from dataclasses import replace

from polyquant.architectures.hyper_table import USUAL
from polyquant.architectures.keys import constant, expert_keys
from polyquant.architectures.mixtral import ATTENTION_NAMES
from polyquant.architectures.mixture import Mixture
from polyquant.architectures.names import NameTable
from polyquant.architectures.parts import Attention, Layer
from polyquant.architectures.qwen_moe import EXPERTS
from polyquant.architectures.record import Architecture, Bias

__all__ = ["OLMOE"]

OLMOE = Architecture(
    name="olmoe",
    model_type="olmoe",
    class_name="OlmoeForCausalLM",
    reads=("olmoe",),
    names=NameTable(
        {
            **ATTENTION_NAMES,
            "self_attn.q_norm": "attn_q_norm",
            "self_attn.k_norm": "attn_k_norm",
            "mlp.gate": "ffn_gate_inp",
        }
    ),
    moves=EXPERTS,
    hyper=replace(
        USUAL.plus(*expert_keys("num_experts", feed_forward=None), constant("expert_norm", 0)),
        always={"norm_topk_prob": False, "clip_qkv": None},
    ),
    layer=Layer(Attention(width_norms=True), Mixture()),
    biases=(Bias(("attn_q", "attn_k", "attn_v", "attn_output"), "attention_bias"),),
)
