"""LFM2 with experts and a sigmoid router except in the first layers (Liquid AI 2025)."""

from __future__ import annotations

from dataclasses import replace

from polyquant.architectures.hyper_table import Key
from polyquant.architectures.keys import GATING, expert_keys, silent
from polyquant.architectures.lfm2 import LFM2, lfm2_table
from polyquant.architectures.mixture import Mixture
from polyquant.architectures.moves import Experts
from polyquant.architectures.record import has
from polyquant.gguf_values import u32

__all__ = ["LFM2_MOE"]

_WARNING = (
    Key("expert_norm", ("norm_topk_prob",), kind="flag", default=1),
    Key("expert_scale", ("routed_scaling_factor",), kind="real", default=1.0),
)
LFM2_MOE = replace(
    LFM2,
    name="lfm2moe",
    model_type="lfm2_moe",
    class_name="Lfm2MoeForCausalLM",
    reads=("lfm2_moe",),
    names=replace(
        LFM2.names,
        layer={**LFM2.names.layer, "feed_forward.gate": "ffn_gate_inp"},
        exact={"feed_forward.expert_bias": "exp_probs_b.bias"},
    ),
    moves=tuple(
        Experts(f"feed_forward.experts.{{e}}.{part}.weight", f"ffn_{name}_exps.weight")
        for part, name in (("w1", "gate"), ("w2", "down"), ("w3", "up"))
    ),
    hyper=replace(
        lfm2_table({}).plus(
            *expert_keys("num_experts"),
            Key("first_dense", ("num_dense_layers",), "leading_dense_block_count", default=2, low=0),
            *_WARNING,
        ),
        metadata={"expert_gating_func": u32(GATING["sigmoid"])},
        tied=True,
        gguf_warning=silent(*_WARNING),
    ),
    layer=replace(LFM2.layer, feed_forward=Mixture(gating="sigmoid", normed=True, eps=1e-6)),
    switches={"use_expert_bias": has("exp_probs_b.bias")},
)
