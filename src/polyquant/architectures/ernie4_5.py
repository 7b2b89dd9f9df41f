"""ERNIE 4.5, dense: Llama, except that pairs (2i, 2i + 1) rotate in transformers too.

Source: modeling_ernie4_5.py of transformers; llama.cpp's converter.
"""

from __future__ import annotations

from dataclasses import replace

from polyquant.architectures.hyper_table import USUAL
from polyquant.architectures.llama import LLAMA_NAMES
from polyquant.architectures.names import NameTable
from polyquant.architectures.record import Architecture, Bias

__all__ = ["ERNIE4_5"]

ERNIE4_5 = Architecture(
    name="ernie4_5",
    model_type="ernie4_5",
    class_name="Ernie4_5ForCausalLM",
    reads=("ernie4_5",),
    names=NameTable(LLAMA_NAMES),
    hyper=replace(USUAL.changed(rope_theta={"default": 500000.0}, norm_eps={"default": 1e-5}), tied=True),
    pairs=True,
    biases=(Bias(("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"), "use_bias"),),
)
