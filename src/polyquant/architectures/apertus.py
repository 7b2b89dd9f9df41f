"""Apertus (Swiss AI 2025): QK norms and a feed-forward part without a gate, y = h + D xielu(U norm(h)).

xIELU (Huang and Schlag 2024) has two learned and two fixed scalars per layer: one-element tensors in Hugging Face, four
metadata lists in GGUF.
Source: modeling_apertus.py of transformers; llama.cpp's converter.
"""

from __future__ import annotations

from polyquant.architectures.hyper_table import USUAL
from polyquant.architectures.names import NameTable
from polyquant.architectures.parts import Attention, FeedForward, Layer
from polyquant.architectures.record import Architecture, Bias, LayerNumber

__all__ = ["APERTUS"]

APERTUS = Architecture(
    name="apertus",
    model_type="apertus",
    class_name="ApertusForCausalLM",
    reads=("apertus",),
    names=NameTable(
        {
            "attention_layernorm": "attn_norm",
            "self_attn.q_proj": "attn_q",
            "self_attn.q_norm": "attn_q_norm",
            "self_attn.k_proj": "attn_k",
            "self_attn.k_norm": "attn_k_norm",
            "self_attn.v_proj": "attn_v",
            "self_attn.o_proj": "attn_output",
            "feedforward_layernorm": "ffn_norm",
            "mlp.up_proj": "ffn_up",
            "mlp.down_proj": "ffn_down",
        }
    ),
    hyper=USUAL.changed(
        rope_theta={"default": 12000000.0},
        norm_eps={"default": 1e-5},
        vocab={"write": "always"},
        rotated={"write": "always"},
        activation={"default": "xielu"},
    ),
    layer=Layer(Attention(head_norms=True), FeedForward(gated=False, activations=("xielu",))),
    biases=(Bias(("attn_q", "attn_k", "attn_v", "attn_output"), "attention_bias"),),
    layer_numbers={
        "mlp.act_fn.alpha_n": LayerNumber("xielu.alpha_n", (1,)),
        "mlp.act_fn.alpha_p": LayerNumber("xielu.alpha_p", (1,)),
        "mlp.act_fn.beta": LayerNumber("xielu.beta"),
        "mlp.act_fn.eps": LayerNumber("xielu.eps"),
    },
)
