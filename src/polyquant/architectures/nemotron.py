"""Nemotron (Parmar et al. 2024; Minitron): layer norms stored as an offset from 1, ungated squared ReLU; half of each
head rotates.

h = x + O attention(rope(Q n), rope(K n), V n), n = norm(x);  y = h + D relu(U norm(h))^2
"""

from __future__ import annotations

from dataclasses import replace

from polyquant.architectures.changes import Plus
from polyquant.architectures.hyper_table import USUAL
from polyquant.architectures.llama import LLAMA_NAMES
from polyquant.architectures.names import NameTable
from polyquant.architectures.parts import Attention, FeedForward, Layer
from polyquant.architectures.record import Architecture, Bias
from polyquant.gguf_values import string

__all__ = ["NEMOTRON"]

NEMOTRON = Architecture(
    name="nemotron",
    model_type="nemotron",
    class_name="NemotronForCausalLM",
    reads=("nemotron",),
    names=NameTable({hf: gguf for hf, gguf in LLAMA_NAMES.items() if gguf != "ffn_gate"}),
    changes=dict.fromkeys(("attn_norm", "ffn_norm", "output_norm"), Plus(1.0)),
    hyper=replace(
        USUAL.changed(
            norm_eps={"config": ("norm_eps",), "also": ("attention.layer_norm_epsilon",), "default": 1e-5},
            vocab={"write": "always"},
            rotated={"default": 0.5, "write": "always"},
            activation={"default": "relu2"},
        ),
        metadata={"rope.scaling.type": string("none")},
    ),
    layer=Layer(Attention(), FeedForward(gated=False, activations=("relu2",))),
    norm="layer",
    biases=(
        Bias(("attn_q", "attn_k", "attn_v", "attn_output"), "attention_bias"),
        Bias(("ffn_up", "ffn_down"), "mlp_bias"),
    ),
)
