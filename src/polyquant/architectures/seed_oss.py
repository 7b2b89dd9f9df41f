"""Seed-OSS: Llama with biases on q, k and v; rows are not permuted. GGUF calls the norm before the feed-forward part
post_attention_norm.

Source: modeling_seed_oss.py of transformers; llama.cpp's converter.
"""

from __future__ import annotations

from dataclasses import replace

from polyquant.architectures.hyper_table import USUAL
from polyquant.architectures.llama import LLAMA_NAMES
from polyquant.architectures.names import NameTable
from polyquant.architectures.parts import FeedForward, Layer
from polyquant.architectures.record import Architecture, Bias

__all__ = ["SEED_OSS"]

SEED_OSS = Architecture(
    name="seed_oss",
    model_type="seed_oss",
    class_name="SeedOssForCausalLM",
    reads=("seed_oss",),
    names=NameTable({**LLAMA_NAMES, "post_attention_layernorm": "post_attention_norm"}),
    hyper=replace(USUAL, tied=False),
    layer=Layer(feed_forward=FeedForward(norm="post_attention_norm")),
    biases=(
        Bias(("attn_q", "attn_k", "attn_v"), "attention_bias"),
        Bias(("attn_output",), "attention_out_bias"),
        Bias(("ffn_up", "ffn_gate", "ffn_down"), "mlp_bias"),
    ),
)
