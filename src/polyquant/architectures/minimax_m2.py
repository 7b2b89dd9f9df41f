"""MiniMax-M2 (2025): sigmoid router with a selection bias, full-width QK norms; half of each head rotates.

The experts with the highest sigmoid(router) + bias are selected; their weights are sigmoid(router), scaled to sum to 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from polyquant.architectures.hyper_table import USUAL
from polyquant.architectures.keys import constant, expert_keys, experts_as_wide, gating_key
from polyquant.architectures.mixtral import ATTENTION_NAMES, NUMBERED_EXPERTS
from polyquant.architectures.mixture import Mixture
from polyquant.architectures.names import NameTable
from polyquant.architectures.parts import Attention, Layer
from polyquant.architectures.record import Architecture

__all__ = ["MINIMAX_M2"]


def _share(config: Mapping[str, Any]) -> Any:
    """Return the rotary fraction of a head, which configurations on the hub specify as a count."""
    rotary, head_dim = config.get("rotary_dim"), config.get("head_dim")
    if isinstance(rotary, int) and isinstance(head_dim, int) and head_dim > 0:
        return rotary / head_dim
    return config.get("partial_rotary_factor")


MINIMAX_M2 = Architecture(
    name="minimax-m2",
    model_type="minimax_m2",
    class_name="MiniMaxM2ForCausalLM",
    reads=("minimax_m2",),
    names=NameTable(
        {
            **ATTENTION_NAMES,
            "self_attn.q_norm": "attn_q_norm",
            "self_attn.k_norm": "attn_k_norm",
            "block_sparse_moe.gate": "ffn_gate_inp",
        },
        exact={"block_sparse_moe.e_score_correction_bias": "exp_probs_b.bias"},
    ),
    moves=NUMBERED_EXPERTS,
    hyper=replace(
        USUAL.changed(rotated={"write": "always", "read": _share}).plus(
            *expert_keys("num_local_experts", feed_forward=None),
            experts_as_wide(),
            gating_key(default="sigmoid"),
            constant("expert_norm", 1),
        ),
        written={"use_routing_bias": True, "use_qk_norm": True, "qk_norm_type": "per_layer"},
        more_config=lambda hyper: {"rotary_dim": hyper.rotary_size},
    ),
    layer=Layer(Attention(width_norms=True), Mixture(gating="sigmoid", normed=True)),
)
