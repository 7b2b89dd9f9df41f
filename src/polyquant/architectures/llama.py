"""Llama and Mistral: one GGUF architecture, `llama`. Its q and k rows are stored interleaved.

h = x + O attention(rope(Q norm(x)), rope(K norm(x)), V norm(x));  y = h + D (silu(G norm(h)) * U norm(h))
"""

from __future__ import annotations

from dataclasses import replace

from polyquant.architectures.changes import PairedRows
from polyquant.architectures.hyper_table import USUAL
from polyquant.architectures.names import NameTable
from polyquant.architectures.record import Architecture, Bias
from polyquant.architectures.windows import in_every_layer

__all__ = ["LLAMA", "LLAMA_NAMES", "MISTRAL"]

LLAMA_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""Stems of a Llama layer, which most architectures share."""

LLAMA = Architecture(
    name="llama",
    model_type="llama",
    class_name="LlamaForCausalLM",
    reads=("llama",),
    names=NameTable(LLAMA_NAMES),
    hyper=USUAL.changed(vocab={"write": "always"}, rotated={"write": "always"}),
    changes={"attn_q": PairedRows("heads"), "attn_k": PairedRows("kv_heads")},
    biases=(
        Bias(("attn_q", "attn_k", "attn_v", "attn_output"), "attention_bias"),
        Bias(("ffn_up", "ffn_gate", "ffn_down"), "mlp_bias"),
    ),
)
MISTRAL = replace(
    LLAMA,
    model_type="mistral",
    class_name="MistralForCausalLM",
    reads=("mistral",),
    hyper=replace(LLAMA.hyper, windows=in_every_layer),
)
