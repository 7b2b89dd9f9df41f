"""BLOOM (Le Scao et al. 2022): ALiBi instead of RoPE, layer norms, one of them after the embedding, biases everywhere.

h = x + O attention(q, k, v), [q, k, v] = QKV norm(x);  y = h + D gelu(U norm(h))

The fused QKV rows are ordered by head, [heads, 3, d]; in GGUF they are all q, all k, all v. The feed-forward width is 4
* hidden.
Source: modeling_bloom.py of transformers; llama.cpp's converter.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from polyquant.architectures.changes import Change
from polyquant.architectures.hyper import Hyper
from polyquant.architectures.hyper_table import USUAL
from polyquant.architectures.keys import four_times, layer_norm_eps, no_head_dim
from polyquant.architectures.names import NameTable
from polyquant.architectures.parts import Attention, Ends, FeedForward, Layer
from polyquant.architectures.record import Architecture, Bias
from polyquant.errors import InputError
from polyquant.operations import Operation, Rows
from polyquant.types import Shape

__all__ = ["BLOOM", "all_q_first"]


def all_q_first(hyper: Hyper, shape: Shape) -> Operation:
    """Reorder the rows (and biases) of q, k and v: [heads, 3, d] -> [3, heads, d].

    Raises InputError if the row count does not fit.
    """
    size = 3 * hyper.query_width
    if not shape or shape[0] != size:
        raise InputError("rows do not fit the heads of the configuration", expected=size, found=list(shape))
    order = np.arange(size, dtype=np.int64).reshape(hyper.heads, 3, hyper.head_size)
    return Rows(np.ascontiguousarray(order.swapaxes(0, 1)).reshape(-1))


BLOOM = Architecture(
    name="bloom",
    model_type="bloom",
    class_name="BloomForCausalLM",
    reads=("bloom",),
    names=NameTable(
        {
            "input_layernorm": "attn_norm",
            "self_attention.query_key_value": "attn_qkv",
            "self_attention.dense": "attn_output",
            "post_attention_layernorm": "ffn_norm",
            "mlp.dense_h_to_4h": "ffn_up",
            "mlp.dense_4h_to_h": "ffn_down",
        },
        top={
            "transformer.word_embeddings": "token_embd",
            "transformer.word_embeddings_layernorm": "token_embd_norm",
            "transformer.ln_f": "output_norm",
            "lm_head": "output",
        },
        prefix="transformer.h.",
    ),
    changes={"attn_qkv": Change(all_q_first, biases=True)},
    hyper=replace(
        USUAL.changed(
            layers={"config": ("n_layer", "num_hidden_layers")},
            context={"config": ("seq_length",), "default": "hidden"},
            hidden={"config": ("hidden_size", "n_embed")},
            feed_forward=four_times("n_inner", "hidden_size", "n_embed"),
            heads={"config": ("n_head", "num_attention_heads")},
            kv_heads={"config": ()},
            norm_eps=layer_norm_eps("layer_norm_epsilon"),
            rope_theta={"config": (), "write": "never"},
            rotated={"config": (), "write": "never"},
            head_dim=no_head_dim(),
            activation={"config": (), "default": "gelu_pytorch_tanh"},
        ),
        always={"apply_residual_connection_post_layernorm": False},
        tied=True,
    ),
    layer=Layer(Attention(fused=True, alibi=True), FeedForward(gated=False, activations=("gelu_pytorch_tanh",))),
    ends=Ends(norm=True),
    norm="layer",
    biases=(Bias(("attn_qkv", "attn_output", "ffn_up", "ffn_down")),),
)  # fmt: skip
