"""Llama 4 (Meta 2025), the text model: every second layer has experts, of which each token takes one, and a shared expert beside them; each fourth layer
attends to everything without positions, its queries the longer the later they come, the others to chunks of 8192. Neighbours of a head rotate; then q and k
are divided by their root mean square.

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
from polyquant.architectures.mixture import Mixture
from polyquant.architectures.moves import halves
from polyquant.architectures.names import NameTable
from polyquant.architectures.parts import Attention, Layer
from polyquant.architectures.record import Architecture, Bias

__all__ = ["LLAMA4"]

_PARTS = ("gate", "up", "down")


_CHUNK, _PERIOD = 8192, 4


def _temperature(config: Mapping[str, Any]) -> Any:
    return config.get("attn_scale", 0.1) if config.get("attn_temperature_tuning", True) else 0.0


def _unsaid(hyper: Hyper) -> str | None:
    """Of the two models the one with 128 experts does not norm q and k: llama.cpp tells it so, too."""
    if (hyper.more["temperature"], hyper.count("temperature_floor")) != (0.1, 8192):
        return "GGUF cannot say attn_scale and floor_scale: runtimes will take 0.1 and 8192"
    usual = hyper.count("unit_heads") == (hyper.count("experts") != 128)
    return None if usual else "GGUF cannot say use_qk_norm: runtimes will take it that models with 128 experts do not"


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
    moves=(halves("feed_forward.experts.gate_up_proj", "ffn_gate_exps.weight", "ffn_up_exps.weight", turned=True),),
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
            Key("temperature", ("attn_scale",), default=0.1, kind="real", read=_temperature),
            Key("temperature_floor", ("floor_scale",), default=8192),
            Key(
                "unit_heads", ("use_qk_norm",), default=1, kind="flag", read_gguf=lambda get: get("expert_count") != 128
            ),
        ),
        always={"attention_chunk_size": _CHUNK, "no_rope_layer_interval": _PERIOD},
        written={"attn_temperature_tuning": True},
        unsaid=_unsaid,
    ),
    layer=Layer(
        Attention(still=_PERIOD, chunk=_CHUNK, late_norms=True, unit_heads=True),
        Mixture(gating="sigmoid", weighed="inputs", shared=True),
    ),
    pairs=True,
    biases=(Bias(("attn_q", "attn_k", "attn_v", "attn_output"), "attention_bias"),),
)
