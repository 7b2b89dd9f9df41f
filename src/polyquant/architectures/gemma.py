"""Gemma and Gemma 2: norms stored as an offset from 1, embeddings scaled by sqrt(hidden), tied head.

gemma     h = x + O attention(norm(x));  y = h + D (gelu(G norm(h)) * U norm(h))
gemma2    a norm after each part too; logits and scores capped; every second layer has a sliding window

GGUF has no key for query_pre_attn_scalar: readers divide by sqrt(head_dim), and for the largest model of each family by
sqrt(hidden / heads).
Source: modeling_gemma*.py of transformers; llama.cpp's converter and graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from polyquant.architectures.changes import Plus
from polyquant.architectures.hyper import Hyper
from polyquant.architectures.hyper_table import USUAL, Key
from polyquant.architectures.keys import sliding_window, softcap_key
from polyquant.architectures.llama import LLAMA_NAMES
from polyquant.architectures.names import NameTable
from polyquant.architectures.parts import Attention, Ends, FeedForward, Layer
from polyquant.architectures.record import Architecture
from polyquant.architectures.windows import all_but_every, gguf_windows, layer_types, where_listed

__all__ = ["FOUR_NORMS", "GELU", "GEMMA", "GEMMA2", "GEMMA_TABLE", "NORMS", "attention_scale", "query_scalar"]

FOUR_NORMS = {
    **LLAMA_NAMES,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
"""A norm before and one after each part."""

GEMMA_TABLE = USUAL.changed(
    rope_theta={"write": "unless default"},
    head_dim={"default": 256, "write": "always"},
    activation={"config": ("hidden_activation",), "default": "gelu_pytorch_tanh"},
)

GELU = ("gelu_pytorch_tanh", "gelu_new", "gelu")

GEMMA = Architecture(
    name="gemma",
    model_type="gemma",
    class_name="GemmaForCausalLM",
    reads=("gemma",),
    names=NameTable(LLAMA_NAMES),
    changes=dict.fromkeys(("attn_norm", "ffn_norm", "output_norm"), Plus(1.0)),
    hyper=replace(GEMMA_TABLE.changed(activation={"config": ("hidden_act",)}), tied=True),
    layer=Layer(Attention(), FeedForward(activations=GELU)),
    ends=Ends(root=True),
)


def attention_scale(largest: int) -> tuple[Key, Callable[[Hyper], str | None]]:
    """Return the row (0 means 1 / sqrt(head_dim)) and its `HyperTable.gguf_warning`.

    largest: number of layers of the model that readers of GGUF treat differently.
    """

    def of_config(config: Mapping[str, Any]) -> float:
        scalar = config.get("query_pre_attn_scalar", 256)
        usual = isinstance(scalar, bool) or not isinstance(scalar, int | float) or scalar == config.get("head_dim", 256)
        return 0.0 if usual or scalar <= 0 else float(scalar**-0.5)

    def implied(layers: Any, hidden: Any, heads: Any) -> float:
        return float((hidden / heads) ** -0.5) if layers == largest and hidden and heads else 0.0

    def of_gguf(get: Callable[..., Any]) -> float:
        return implied(get("block_count"), get("embedding_length"), get("attention.head_count"))

    def gguf_warning(hyper: Hyper) -> str | None:
        usual, scale = hyper.head_size**-0.5, hyper.real("attention_scale", 0.0)
        expected = implied(hyper.layers, hyper.hidden, hyper.heads) or usual
        if abs((scale or usual) - expected) < 1e-6 * expected:
            return None
        return "GGUF has no key for query_pre_attn_scalar: runtimes will scale attention scores differently"

    return Key("attention_scale", (), default=0.0, kind="real", read=of_config, read_gguf=of_gguf), gguf_warning


def query_scalar(hyper: Hyper) -> dict[str, Any]:
    """Return the config.json entry for the attention scale."""
    scale = hyper.real("attention_scale", 0.0)
    value = round(scale**-2, 3) if scale else hyper.head_size
    return {"query_pre_attn_scalar": int(value) if value == int(value) else value}


_SCALE, _SCALE_WARNING = attention_scale(46)
NORMS = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm", "output_norm")


def _gguf_warning(hyper: Hyper) -> str | None:
    if not (hyper.more["attention_softcap"] and hyper.more["logit_softcap"]):
        return "GGUF cannot express a Gemma 2 without score or logit capping: runtimes will cap them"
    return _SCALE_WARNING(hyper)


GEMMA2 = replace(
    GEMMA,
    name="gemma2",
    model_type="gemma2",
    class_name="Gemma2ForCausalLM",
    reads=("gemma2",),
    names=NameTable(FOUR_NORMS),
    changes=dict.fromkeys(NORMS, Plus(1.0)),
    layer=Layer(Attention(post_norm=True), FeedForward(activations=GELU, post_norm=True)),
    hyper=replace(
        GEMMA_TABLE.plus(
            softcap_key("attention_softcap", 50.0),
            softcap_key("logit_softcap", 30.0),
            sliding_window(default=4096),
            _SCALE,
        ),
        tied=True,
        windows=where_listed(all_but_every(2)),
        gguf_windows=gguf_windows(all_but_every(2)),
        more_config=lambda hyper: {**layer_types(hyper), **query_scalar(hyper)},
        gguf_warning=_gguf_warning,
    ),
)
