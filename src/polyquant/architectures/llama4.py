"""Llama 4 (Meta 2025), the text model.

Every second layer has routed experts, one selected per token, and a shared expert. Every fourth layer has full
attention without positions and scales its queries with the position; the others attend within chunks of 8192. Adjacent
pairs rotate; then q and k are divided by their root mean square.

The selected expert reads sigmoid(router) norm(h). Experts are stored [experts, in, out], gate and up side by side.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from polyquant.architectures.changes import Transposed
from polyquant.architectures.fused import Fused
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


def _gguf_warning(hyper: Hyper) -> str | None:
    """Return what GGUF cannot express.

    The model with 128 experts has no QK norm, which llama.cpp infers from the count.
    """
    if (hyper.more["temperature"], hyper.count("temperature_floor")) != (0.1, 8192):
        return "GGUF cannot express attn_scale and floor_scale: runtimes will use 0.1 and 8192"
    usual = hyper.count("unit_heads") == (hyper.count("experts") != 128)
    return None if usual else "GGUF cannot express use_qk_norm: runtimes assume that models with 128 experts lack it"


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
    moves=(halves("feed_forward.experts.gate_up_proj", "ffn_gate_exps.weight", "ffn_up_exps.weight", transposed=True),),
    fused=Fused(
        "feed_forward.experts.gate_up_proj",
        "feed_forward.experts.down_proj",
        "feed_forward.experts",
        "feed_forward.experts.{e}.{part}",
        transposed=True,
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
            Key("temperature", ("attn_scale",), default=0.1, kind="real", read=_temperature),
            Key("temperature_floor", ("floor_scale",), default=8192),
            Key(
                "unit_heads", ("use_qk_norm",), default=1, kind="flag", read_gguf=lambda get: get("expert_count") != 128
            ),
        ),
        always={"attention_chunk_size": _CHUNK, "no_rope_layer_interval": _PERIOD},
        written={"attn_temperature_tuning": True},
        gguf_warning=_gguf_warning,
    ),
    layer=Layer(
        Attention(no_rope_every=_PERIOD, chunk=_CHUNK, late_norms=True, unit_heads=True),
        Mixture(gating="sigmoid", weighted="inputs", shared=True),
    ),
    pairs=True,
    biases=(Bias(("attn_q", "attn_k", "attn_v", "attn_output"), "attention_bias"),),
)
