"""Qwen's mixtures of experts. GGUF stacks the experts: `ffn_gate_exps` [experts, width, hidden].

qwen2moe    a gated shared expert (ffn_gate_inp_shexp); biases on q, k, v
qwen3moe    QK norms; no shared expert
"""

from __future__ import annotations

from dataclasses import replace

from polyquant.architectures.keys import always_normed, expert_keys, expert_norm_key, never_normed, shared_expert_key
from polyquant.architectures.llama import LLAMA_NAMES
from polyquant.architectures.mixture import Mixture
from polyquant.architectures.moves import Experts
from polyquant.architectures.names import NameTable
from polyquant.architectures.parts import Layer
from polyquant.architectures.qwen import QWEN2, QWEN3

__all__ = ["EXPERTS", "QWEN2_MOE", "QWEN3_MOE", "SHARED"]

EXPERTS = tuple(
    Experts(f"mlp.experts.{{e}}.{part}_proj.weight", f"ffn_{part}_exps.weight") for part in ("gate", "up", "down")
)
"""One matrix per expert, under the usual names."""

SHARED = {f"mlp.shared_expert.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")}
"""The shared expert."""

QWEN2_MOE = replace(
    QWEN2,
    name="qwen2moe",
    model_type="qwen2_moe",
    class_name="Qwen2MoeForCausalLM",
    reads=("qwen2_moe",),
    names=NameTable(
        {**LLAMA_NAMES, **SHARED, "mlp.gate": "ffn_gate_inp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp"}
    ),
    moves=EXPERTS,
    hyper=replace(
        QWEN2.hyper.plus(
            *expert_keys(), shared_expert_key("shared_expert_intermediate_size"), expert_norm_key(readers=False)
        ),
        gguf_warning=never_normed,
    ),
    layer=Layer(feed_forward=Mixture(shared=True, shared_gate=True)),
)
QWEN3_MOE = replace(
    QWEN3,
    name="qwen3moe",
    model_type="qwen3_moe",
    class_name="Qwen3MoeForCausalLM",
    reads=("qwen3_moe",),
    names=NameTable({**QWEN3.names.layer, "mlp.gate": "ffn_gate_inp"}),
    moves=EXPERTS,
    hyper=replace(QWEN3.hyper.plus(*expert_keys(), expert_norm_key()), gguf_warning=always_normed),
    layer=replace(QWEN3.layer, feed_forward=Mixture(normed=True)),
)
