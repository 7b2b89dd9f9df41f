"""Nemotron-H with experts (Nemotron 3, NVIDIA 2025): some layers have sigmoid-routed experts and a shared one, each D
relu(U x)^2.

The routed experts may work in a smaller latent space (moe_latent_size), which is a separate record. GGUF architecture
`nemotron_h_moe`.
"""

from __future__ import annotations

from dataclasses import replace

from polyquant.architectures.hyper_table import Key
from polyquant.architectures.keys import expert_keys, shared_expert_key
from polyquant.architectures.mixture import Mixture
from polyquant.architectures.moves import Experts
from polyquant.architectures.nemotron_h import MLP, NEMOTRON_H
from polyquant.architectures.nemotron_h_layers import one_part_layer

__all__ = ["NEMOTRON_H_LATENT", "NEMOTRON_H_MOE"]

_EXPERTS = Mixture(
    dense=MLP,
    norm="attn_norm",
    gated=False,
    activations=("relu2",),
    gating="sigmoid",
    normed=True,
    eps=1e-20,
    group_score="top2",
    shared=True,
)
NEMOTRON_H_MOE = replace(
    NEMOTRON_H,
    name="nemotron_h_moe",
    requires=("num_experts_per_tok",),
    names=replace(
        NEMOTRON_H.names,
        layer={
            **NEMOTRON_H.names.layer,
            "mixer.gate": "ffn_gate_inp",
            "mixer.shared_experts.up_proj": "ffn_up_shexp",
            "mixer.shared_experts.down_proj": "ffn_down_shexp",
        },
        exact={**NEMOTRON_H.names.exact, "mixer.gate.e_score_correction_bias": "exp_probs_b.bias"},
    ),
    moves=tuple(
        Experts(f"mixer.experts.{{e}}.{part}_proj.weight", f"ffn_{part}_exps.weight") for part in ("up", "down")
    ),
    layer=one_part_layer(_EXPERTS),
    hyper=NEMOTRON_H.hyper.plus(
        *expert_keys("n_routed_experts"),
        shared_expert_key("moe_shared_expert_intermediate_size"),
        Key("shared_experts", ("n_shared_experts",), "expert_shared_count", default=1, low=0),
        Key("expert_norm", ("norm_topk_prob",), "expert_weights_norm", kind="flag", default=1),
        Key("expert_scale", ("routed_scaling_factor",), "expert_weights_scale", kind="real", default=1.0),
        Key("expert_groups", ("n_group",), "expert_group_count", default=1),
        Key("expert_groups_used", ("topk_group",), "expert_group_used_count", default=1),
    ),
)
_LATENT = {"mixer.fc1_latent_proj": "ffn_latent_down", "mixer.fc2_latent_proj": "ffn_latent_up"}
NEMOTRON_H_LATENT = replace(
    NEMOTRON_H_MOE,
    requires=("num_experts_per_tok", "moe_latent_size"),
    gguf_requires=("moe_latent_size",),
    names=replace(NEMOTRON_H_MOE.names, layer={**NEMOTRON_H_MOE.names.layer, **_LATENT}),
    layer=one_part_layer(replace(_EXPERTS, latent=True)),
    hyper=NEMOTRON_H_MOE.hyper.plus(Key("expert_latent", ("moe_latent_size",), "moe_latent_size")),
)
