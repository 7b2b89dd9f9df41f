"""Llama 4 (Meta 2025), the text model: every second layer has experts, of which each token takes one, and a shared expert beside them; each fourth layer
attends to everything without positions, the others to chunks of 8192. Neighbours of a head rotate; then q and k are divided by their length.

The chosen expert reads sigmoid(router) norm(h). Experts are stored [experts, in, out], gate and up side by side.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from polyquant.architectures.changes import Transposed
from polyquant.architectures.hyper import Hyper
from polyquant.architectures.hyper_table import USUAL, Key
from polyquant.architectures.keys import constant, expert_keys
from polyquant.architectures.mixtral import ATTENTION_NAMES
from polyquant.architectures.moves import turned_halves
from polyquant.architectures.names import NameTable
from polyquant.architectures.parts import ConvertedOnly
from polyquant.architectures.record import Architecture, Bias

__all__ = ["LLAMA4"]

_PARTS = ("gate", "up", "down")


def _config(hyper: Hyper) -> Mapping[str, Any]:
    """Of the two models the one with 128 experts does not norm q and k: llama.cpp tells it so, too."""
    return {"use_qk_norm": hyper.count("experts") != 128}


LLAMA4 = Architecture(
    name="llama4",
    model_type="llama4_text",
    class_name="Llama4ForCausalLM",
    reads=("llama4_text",),
    names=NameTable(
        {
            **ATTENTION_NAMES,
            **{f"feed_forward.{part}_proj": f"ffn_{part}" for part in _PARTS},
            **{f"feed_forward.shared_expert.{part}_proj": f"ffn_{part}_shexp" for part in _PARTS},
            "feed_forward.router": "ffn_gate_inp",
        },
        exact={"feed_forward.experts.down_proj": "ffn_down_exps.weight"},
    ),
    changes={"ffn_down_exps": Transposed},
    moves=(
        turned_halves(
            "feed_forward.experts.gate_up_proj", "ffn_gate_exps.weight", "ffn_up_exps.weight", interleaved=False
        ),
    ),
    hyper=replace(
        USUAL.changed(
            feed_forward={"config": ("intermediate_size_mlp",)},
            vocab={"write": "always"},
            rotated={"config": (), "write": "always"},
        ).plus(
            *expert_keys("num_local_experts", feed_forward="intermediate_size"),
            Key("expert_step", ("interleave_moe_layer_step",), "interleave_moe_layer_step", default=1),
            constant("gating", 2),
            constant("expert_norm", 0),
        ),
        always={"attention_chunk_size": 8192, "no_rope_layer_interval": 4},
        written={"attn_temperature_tuning": True, "floor_scale": 8192, "attn_scale": 0.1},
        more_config=_config,
    ),
    layer=ConvertedOnly(),
    pairs=True,
    biases=(Bias(("attn_q", "attn_k", "attn_v", "attn_output"), "attention_bias"),),
)
