"""Qwen2 (biases on q, k, v) and Qwen3 (QK norms). Rows are not permuted; some layers may have sliding windows."""

from __future__ import annotations

from dataclasses import replace

from polyquant.architectures.hyper_table import USUAL
from polyquant.architectures.llama import LLAMA_NAMES
from polyquant.architectures.names import NameTable
from polyquant.architectures.parts import Attention, Layer
from polyquant.architectures.record import Architecture, Bias
from polyquant.architectures.windows import where_enabled

__all__ = ["QWEN2", "QWEN3"]

QWEN2 = Architecture(
    name="qwen2",
    model_type="qwen2",
    class_name="Qwen2ForCausalLM",
    reads=("qwen2",),
    names=NameTable(LLAMA_NAMES),
    hyper=replace(USUAL, windows=where_enabled, written={"use_sliding_window": False}),
    biases=(Bias(("attn_q", "attn_k", "attn_v")),),
)
QWEN3 = replace(
    QWEN2,
    name="qwen3",
    model_type="qwen3",
    class_name="Qwen3ForCausalLM",
    reads=("qwen3",),
    names=NameTable({**LLAMA_NAMES, "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}),
    layer=Layer(attention=Attention(head_norms=True)),
    biases=(Bias(("attn_q", "attn_k", "attn_v", "attn_output"), "attention_bias"),),
)
