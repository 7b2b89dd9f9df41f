"""GPT-NeoX and Pythia (Black et al. 2022): layer norms, biases everywhere, partial rotary embeddings, parallel
attention and feed-forward.

y = x + O attention(rope(q), rope(k), v) + D gelu(U norm2(x)), [q, k, v] = QKV norm1(x); without use_parallel_residual,
norm2 reads the output of attention

The fused QKV rows are ordered by head, [heads, 3, d]; in GGUF they are all q, all k, all v.
Source: modeling_gpt_neox.py of transformers; llama.cpp's converter.
"""

from __future__ import annotations

from dataclasses import replace

from polyquant.architectures.bloom import all_q_first
from polyquant.architectures.changes import Change
from polyquant.architectures.hyper_table import USUAL, Key
from polyquant.architectures.keys import layer_norm_eps, no_head_dim
from polyquant.architectures.names import NameTable
from polyquant.architectures.parts import Attention, FeedForward, ParallelLayer
from polyquant.architectures.record import Architecture, Bias

__all__ = ["GPT_NEOX"]

GPT_NEOX = Architecture(
    name="gptneox",
    model_type="gpt_neox",
    class_name="GPTNeoXForCausalLM",
    reads=("gpt_neox",),
    names=NameTable(
        {
            "input_layernorm": "attn_norm",
            "attention.query_key_value": "attn_qkv",
            "attention.dense": "attn_output",
            "post_attention_layernorm": "ffn_norm",
            "mlp.dense_h_to_4h": "ffn_up",
            "mlp.dense_4h_to_h": "ffn_down",
        },
        top={
            "gpt_neox.embed_in": "token_embd",
            "gpt_neox.final_layer_norm": "output_norm",
            "embed_out": "output",
        },
        prefix="gpt_neox.layers.",
    ),
    changes={"attn_qkv": Change(all_q_first, biases=True)},
    hyper=replace(
        USUAL.changed(
            kv_heads={"config": (), "write": "never"},
            rope_theta={"config": ("rope_theta", "rotary_emb_base"), "write": "unless default"},
            rotated={"config": ("partial_rotary_factor", "rotary_pct"), "default": 0.25, "write": "always"},
            norm_eps=layer_norm_eps("layer_norm_eps"),
            head_dim=no_head_dim(),
            activation={"default": "gelu"},
        ).plus(Key("parallel", ("use_parallel_residual",), "use_parallel_residual", default=1, kind="flag")),
        tied=False,
    ),
    layer=ParallelLayer(
        Attention(fused=True),
        FeedForward(gated=False, activations=("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "relu")),
        flag="parallel",
    ),
    norm="layer",
    biases=(Bias(("attn_qkv", "attn_output", "ffn_up", "ffn_down")),),
)
