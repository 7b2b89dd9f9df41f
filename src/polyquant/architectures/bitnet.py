"""BitNet b1.58 (Ma et al. 2024; BitNet b1.58 2B4T, 2025): ternary linears, with norms before o_proj and down_proj.

| GGUF architecture | written by | activation | from |
|---|---|---|---|
| bitnet-b1.58 | bitnet.cpp | squared ReLU | BitNetForCausalLM (the 2B-4T model) |
| bitnet-25 | older bitnet.cpp | squared ReLU | read only |
| bitnet | llama.cpp | SiLU, regardless of hidden_act | BitnetForCausalLM (1bitLLM models with model_type llama) |

h = x + O norm(attention(...));  y = h + D norm(relu(G norm(h))^2 * U norm(h))

Inputs of the linears are rounded to int8 per token, as in training; llama.cpp's `bitnet` rounds them per block. Rows of
q and k are not permuted. Runtimes expect the embedding as F16; it is a matrix, so the recipe decides.
"""

from __future__ import annotations

from dataclasses import replace

from polyquant.architectures.hyper_table import USUAL
from polyquant.architectures.llama import LLAMA_NAMES
from polyquant.architectures.names import NameTable
from polyquant.architectures.parts import Attention, FeedForward, Layer
from polyquant.architectures.record import Architecture, Bias, Ternary
from polyquant.gguf_values import f32, string

__all__ = ["BITNET", "BITNET_25", "BITNET_B158"]

_TABLE = USUAL.changed(rope_theta={"default": 500000.0})

BITNET_B158 = Architecture(
    name="bitnet-b1.58",
    model_type="bitnet",
    class_name="BitNetForCausalLM",
    reads=("bitnet",),
    claims=("BitNetForCausalLM",),
    names=NameTable(
        {**LLAMA_NAMES, "self_attn.attn_sub_norm": "attn_sub_norm", "mlp.ffn_sub_norm": "ffn_sub_norm"},
        also_read={"self_attn.inner_attn_ln": "attn_sub_norm", "mlp.ffn_layernorm": "ffn_sub_norm"},
    ),
    hyper=_TABLE.changed(vocab={"write": "always"}, rotated={"write": "always"}, activation={"default": "relu2"}),
    layer=Layer(Attention(sub_norm=True), FeedForward(sub_norm=True, activations=("relu2", "silu", "swish"))),
    biases=(Bias(("attn_q", "attn_k", "attn_v", "attn_output"), "attention_bias"),),
    ternary=Ternary(),
)
BITNET_25 = replace(BITNET_B158, name="bitnet-25", reads=(), claims=())
BITNET = replace(
    BITNET_25,
    name="bitnet",
    claims=("BitnetForCausalLM",),
    hyper=replace(_TABLE, metadata={"rope.scaling.type": string("linear"), "rope.scaling.factor": f32(1.0)}),
    ternary=Ternary(tokens_in_gguf=False),
)
