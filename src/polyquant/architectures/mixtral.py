"""Mixtral (Jiang et al. 2024): Llama with experts, distinguished in GGUF, where both are `llama`, by expert_count.

y = h + sum over the selected experts e of softmax(router)_e D_e (silu(G_e norm(h)) * U_e norm(h)); w1 is G, w3 is U, w2
is D
"""

from __future__ import annotations

from dataclasses import replace

from polyquant.architectures.keys import constant, expert_keys
from polyquant.architectures.llama import LLAMA, LLAMA_NAMES
from polyquant.architectures.mixture import Mixture
from polyquant.architectures.moves import Experts
from polyquant.architectures.names import NameTable
from polyquant.architectures.parts import Layer
from polyquant.architectures.record import Bias
from polyquant.architectures.windows import in_every_layer_if_present

__all__ = ["ATTENTION_NAMES", "MIXTRAL", "NUMBERED_EXPERTS"]

ATTENTION_NAMES = {hf: gguf for hf, gguf in LLAMA_NAMES.items() if not hf.startswith("mlp.")}
"""Llama's layer names without the feed-forward matrices."""

NUMBERED_EXPERTS = tuple(
    Experts(f"block_sparse_moe.experts.{{e}}.{theirs}.weight", f"ffn_{ours}_exps.weight")
    for theirs, ours in (("w1", "gate"), ("w2", "down"), ("w3", "up"))
)
"""One matrix per expert, with Mixtral's names."""

MIXTRAL = replace(
    LLAMA,
    model_type="mixtral",
    class_name="MixtralForCausalLM",
    reads=("mixtral",),
    gguf_requires=("expert_count",),
    names=NameTable({**ATTENTION_NAMES, "block_sparse_moe.gate": "ffn_gate_inp"}),
    moves=NUMBERED_EXPERTS,
    hyper=replace(
        LLAMA.hyper.plus(*expert_keys("num_local_experts", feed_forward=None), constant("expert_norm", 1)),
        windows=in_every_layer_if_present,
    ),
    layer=Layer(feed_forward=Mixture(normed=True)),
    biases=(Bias(("attn_q", "attn_k", "attn_v", "attn_output"), "attention_bias"),),
)
