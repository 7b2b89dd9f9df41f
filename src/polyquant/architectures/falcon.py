"""Falcon 7B (Almazrouei et al. 2023): multi-query attention, in parallel with the feed-forward part after one layer
norm.

y = x + O attention(q, k, v) + D gelu(U n), [q, k, v] = QKV n, n = norm(x)

The fused QKV rows are grouped by key head: its q, then k, then v; in GGUF they are all q, all k, all v. Other Falcons
use this name for other architectures: ALiBi and serial parts (RW), two norms (40B, 180B).
Source: modeling_falcon.py of transformers; llama.cpp's converter, which always writes a context of 2048.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from polyquant.architectures.changes import Change
from polyquant.architectures.hyper import Hyper
from polyquant.architectures.hyper_table import USUAL
from polyquant.architectures.keys import four_times, layer_norm_eps, no_head_dim
from polyquant.architectures.names import NameTable
from polyquant.architectures.parts import Attention, FeedForward, ParallelLayer
from polyquant.architectures.record import Architecture, Bias
from polyquant.errors import InputError
from polyquant.gguf_values import string
from polyquant.operations import Operation, Rows
from polyquant.types import Shape

__all__ = ["FALCON"]


def _all_q_first(hyper: Hyper, shape: Shape) -> Operation:
    """Reorder rows: [groups, q.. k v, d] -> all q, all k, all v."""
    group, size = hyper.heads // hyper.kv_heads, hyper.query_width + 2 * hyper.value_width
    if not shape or shape[0] != size:
        raise InputError("rows do not fit the heads of the configuration", expected=size, found=list(shape))
    order = np.arange(size, dtype=np.int64).reshape(hyper.kv_heads, group + 2, hyper.head_size)
    parts = (order[:, :group], order[:, group], order[:, group + 1])
    return Rows(np.concatenate([p.reshape(-1) for p in parts]))


def _kv_heads(config: Mapping[str, Any]) -> Any:
    """Return 1 for multi-query models, regardless of num_kv_heads."""
    counts = (config.get(key) for key in ("num_kv_heads", "n_head_kv", "num_attention_heads", "n_head"))
    return 1 if config.get("multi_query", True) else next((n for n in counts if n is not None), None)


FALCON = Architecture(
    name="falcon",
    model_type="falcon",
    class_name="FalconForCausalLM",
    reads=("falcon", "RefinedWebModel"),
    names=NameTable(
        {
            "input_layernorm": "attn_norm",
            "self_attention.query_key_value": "attn_qkv",
            "self_attention.dense": "attn_output",
            "mlp.dense_h_to_4h": "ffn_up",
            "mlp.dense_4h_to_h": "ffn_down",
        },
        top={"transformer.word_embeddings": "token_embd", "transformer.ln_f": "output_norm", "lm_head": "output"},
        prefix="transformer.h.",
    ),
    changes={"attn_qkv": Change(_all_q_first, biases=True)},
    hyper=replace(
        USUAL.changed(
            layers={"config": ("num_hidden_layers", "n_layer")},
            context={"config": ()},
            feed_forward=four_times("ffn_hidden_size", "hidden_size"),
            heads={"config": ("num_attention_heads", "n_head")},
            kv_heads={
                "config": ("num_kv_heads",),
                "read": _kv_heads,
                "entries": lambda value: {"num_kv_heads": value, "multi_query": value == 1},
            },
            norm_eps=layer_norm_eps("layer_norm_epsilon"),
            rope_theta={"write": "unless default"},
            rotated={"config": ()},
            head_dim=no_head_dim(),
            activation={"config": ("activation",), "default": "gelu"},
        ),
        always={"alibi": False, "parallel_attn": True, "new_decoder_architecture": False},
        written={"max_position_embeddings": 2048},
        metadata={"tensor_data_layout": string("jploski")},
        tied=True,
    ),
    layer=ParallelLayer(
        Attention(fused=True), FeedForward(gated=False, norm="attn_norm", activations=("gelu",)), shared=True
    ),
    norm="layer",
    biases=(Bias(("attn_qkv", "attn_output", "ffn_up", "ffn_down"), "bias"),),
)
