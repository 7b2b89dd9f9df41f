"""Gemma and Gemma 2: norms stored as their distance from one, embeddings multiplied by sqrt(hidden), the head is the embedding.

gemma     h = x + O attention(norm(x));  y = h + D (gelu(G norm(h)) * U norm(h))
gemma2    a norm behind each part too; logits and scores capped; every second layer has a window

GGUF has no key for query_pre_attn_scalar: its readers divide by sqrt(head_dim), in the largest model of each by sqrt(hidden / heads).
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
from polyquant.architectures.parts import ConvertedOnly
from polyquant.architectures.record import Architecture
from polyquant.architectures.windows import all_but_every, gguf_windows, layer_types, where_listed

__all__ = ["FOUR_NORMS", "GEMMA", "GEMMA2", "GEMMA_TABLE", "NORMS", "attention_scale", "query_scalar"]

FOUR_NORMS = {
    **LLAMA_NAMES,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
"""A norm before and one behind each part."""

GEMMA_TABLE = USUAL.changed(
    rope_theta={"write": "unless default"},
    head_dim={"default": 256, "write": "always"},
    activation={"config": ("hidden_activation",), "default": "gelu_pytorch_tanh"},
)

GEMMA = Architecture(
    name="gemma",
    model_type="gemma",
    class_name="GemmaForCausalLM",
    reads=("gemma",),
    names=NameTable(LLAMA_NAMES),
    changes=dict.fromkeys(("attn_norm", "ffn_norm", "output_norm"), Plus(1.0)),
    hyper=replace(GEMMA_TABLE.changed(activation={"config": ("hidden_act",)}), tied=True),
    layer=ConvertedOnly(),
)


def attention_scale(largest: int) -> tuple[Key, Callable[[Hyper], str | None]]:
    """(its row, which is 0 for 1 / sqrt(head_dim); what GGUF cannot say of it). largest: layers of the model that readers of GGUF treat otherwise."""

    def of_config(config: Mapping[str, Any]) -> float:
        scalar = config.get("query_pre_attn_scalar", 256)
        usual = isinstance(scalar, bool) or not isinstance(scalar, int | float) or scalar == config.get("head_dim", 256)
        return 0.0 if usual or scalar <= 0 else float(scalar**-0.5)

    def taken(layers: Any, hidden: Any, heads: Any) -> float:
        return float((hidden / heads) ** -0.5) if layers == largest and hidden and heads else 0.0

    def of_gguf(get: Callable[..., Any]) -> float:
        return taken(get("block_count"), get("embedding_length"), get("attention.head_count"))

    def unsaid(hyper: Hyper) -> str | None:
        usual, said = hyper.head_size**-0.5, hyper.real("attention_scale", 0.0)
        expected = taken(hyper.layers, hyper.hidden, hyper.heads) or usual
        if abs((said or usual) - expected) < 1e-6 * expected:
            return None
        return "GGUF has no key for query_pre_attn_scalar: runtimes will scale the scores of attention otherwise"

    return Key("attention_scale", (), default=0.0, kind="real", read=of_config, read_gguf=of_gguf), unsaid


def query_scalar(hyper: Hyper) -> dict[str, Any]:
    """The entry of config.json that says the scale of attention."""
    scale = hyper.real("attention_scale", 0.0)
    value = round(scale**-2, 3) if scale else hyper.head_size
    return {"query_pre_attn_scalar": int(value) if value == int(value) else value}


_SCALE, _SCALE_UNSAID = attention_scale(46)
NORMS = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm", "output_norm")


def _unsaid(hyper: Hyper) -> str | None:
    if not (hyper.more["attention_softcap"] and hyper.more["logit_softcap"]):
        return "GGUF cannot say that a Gemma 2 caps no scores or logits: runtimes will cap them"
    return _SCALE_UNSAID(hyper)


GEMMA2 = replace(
    GEMMA,
    name="gemma2",
    model_type="gemma2",
    class_name="Gemma2ForCausalLM",
    reads=("gemma2",),
    names=NameTable(FOUR_NORMS),
    changes=dict.fromkeys(NORMS, Plus(1.0)),
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
        unsaid=_unsaid,
    ),
)
