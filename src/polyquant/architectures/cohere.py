"""Command-R and Aya: layer norms without bias, parallel attention and feed-forward, pairs (2i, 2i + 1) rotate.

Command-R+ adds QK norms with separate weights for every head.

y = x + O attention(rope(Q n), rope(K n), V n) + D (silu(G n) * U n), n = norm(x);  logits times logit_scale

Source: modeling_cohere.py of transformers; llama.cpp's converter.
"""

from __future__ import annotations

from dataclasses import replace

from polyquant.architectures.hyper_table import USUAL, Key
from polyquant.architectures.keys import layer_norm_eps, no_head_dim
from polyquant.architectures.llama import LLAMA_NAMES
from polyquant.architectures.names import NameTable
from polyquant.architectures.parts import Attention, FeedForward, ParallelLayer
from polyquant.architectures.record import Architecture, Bias, has
from polyquant.gguf_values import string

__all__ = ["COHERE"]

COHERE = Architecture(
    name="command-r",
    model_type="cohere",
    class_name="CohereForCausalLM",
    reads=("cohere",),
    names=NameTable(
        {
            **{hf: gguf for hf, gguf in LLAMA_NAMES.items() if gguf != "ffn_norm"},
            "self_attn.q_norm": "attn_q_norm",
            "self_attn.k_norm": "attn_k_norm",
        }
    ),
    hyper=replace(
        USUAL.changed(
            context={"config": ("model_max_length", "max_position_embeddings")},  # the first is the trained length
            norm_eps=layer_norm_eps("layer_norm_eps"),
            head_dim=no_head_dim(),
        ).plus(Key("logit_scale", ("logit_scale",), "logit_scale", default=0.0625, kind="real")),
        metadata={"rope.scaling.type": string("none")},
        tied=True,
    ),
    layer=ParallelLayer(Attention(each_norm=True), FeedForward(norm="attn_norm"), shared=True),
    norm="layer",
    pairs=True,
    switches={"use_qk_norm": has("attn_q_norm.weight")},
    biases=(Bias(("attn_q", "attn_k", "attn_v", "attn_output"), "attention_bias"),),
)
