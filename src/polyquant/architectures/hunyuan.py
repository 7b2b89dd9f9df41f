"""Hunyuan, dense: QK norms after RoPE.

`alpha` of a scaling called dynamic changes the RoPE base once, statically, to theta alpha^(d / (d - 2)), for contexts
of 2^18.

h = x + O attention(norm(rope(Q norm(x))), norm(rope(K norm(x))), V norm(x));  y = h + D (silu(G norm(h)) * U norm(h))

Source: modeling_hunyuan_v1_dense.py of transformers; llama.cpp's converter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from polyquant.architectures import rope
from polyquant.architectures.hyper import Hyper
from polyquant.architectures.hyper_table import USUAL, Key
from polyquant.architectures.llama import LLAMA_NAMES
from polyquant.architectures.names import NameTable
from polyquant.architectures.parts import Attention, Layer
from polyquant.architectures.record import Architecture, Bias
from polyquant.gguf_values import f32, string, u32
from polyquant.types import Meta

__all__ = ["HUNYUAN_DENSE"]

_LONG = 1 << 18
"""The context of a model with alpha; its config.json declares less."""


def _alpha(config: Mapping[str, Any]) -> float:
    """Return alpha, 0 for a model without it."""
    parameters = rope.parameters(config, None)
    alpha = parameters.get("alpha")
    dynamic = parameters.get("rope_type", parameters.get("type")) == "dynamic"
    return float(alpha) if dynamic and isinstance(alpha, int | float) and not isinstance(alpha, bool) else 0.0


def _theta(config: Mapping[str, Any]) -> Any:
    """Return the RoPE base, scaled by alpha."""
    theta = config.get("rope_theta", rope.parameters(config, None).get("rope_theta", 10000.0))
    alpha, head = _alpha(config), config.get("head_dim") or 0
    if not alpha or not isinstance(theta, int | float) or not isinstance(head, int):
        return theta
    head = head or config.get("hidden_size", 0) // max(config.get("num_attention_heads", 1), 1)
    try:
        return theta * alpha ** (head / (head - 2)) if head > 2 else theta
    except OverflowError:
        return math.inf  # rejected later, like every non-finite value


def _context(config: Mapping[str, Any]) -> Any:
    return _LONG if _alpha(config) else config.get("max_position_embeddings")


def _scaling(config: Mapping[str, Any], parameters: Mapping[str, Any], file: object) -> dict[str, Any]:
    return {} if _alpha(config) else rope.of_config(config, parameters, file)


def _metadata(hyper: Hyper) -> dict[str, Meta]:
    if not hyper.more["alpha"]:
        return {}
    return {
        "rope.scaling.type": string("none"),
        "rope.scaling.factor": f32(1.0),
        "rope.scaling.original_context_length": u32(_LONG),
    }


HUNYUAN_DENSE = Architecture(
    name="hunyuan-dense",
    model_type="hunyuan_v1_dense",
    class_name="HunYuanDenseV1ForCausalLM",
    reads=("hunyuan_v1_dense",),
    names=NameTable(
        {**LLAMA_NAMES, "self_attn.query_layernorm": "attn_q_norm", "self_attn.key_layernorm": "attn_k_norm"}
    ),
    hyper=replace(
        USUAL.changed(context={"read": _context}, rope_theta={"read": _theta}, norm_eps={"default": 1e-5}).plus(
            Key("alpha", (), default=0.0, kind="real", read=_alpha)
        ),
        tied=False,
        scaling=_scaling,
        more_metadata=_metadata,
    ),
    layer=Layer(Attention(head_norms=True, late_norms=True)),
    biases=(Bias(("attn_q", "attn_k", "attn_v", "attn_output"), "attention_bias"),),
)
