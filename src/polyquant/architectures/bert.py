"""BERT (Devlin et al. 2018), a bidirectional text encoder: learned positions, biases everywhere, post-norm.

    h = norm(x + attention(x));  y = norm(h + D gelu(U h))

GGUF stores neither the pooler nor a head; pooling.py defines how token vectors are pooled.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from polyquant.architectures.bidirectional import PostNormLayer
from polyquant.architectures.hyper_table import USUAL, Key
from polyquant.architectures.keys import layer_norm_eps, no_head_dim
from polyquant.architectures.mixer import NO_ROPE
from polyquant.architectures.names import NameTable
from polyquant.architectures.parts import Attention, Ends, FeedForward
from polyquant.architectures.record import Architecture, Bias
from polyquant.gguf_values import boolean

__all__ = ["BERT", "BIDIRECTIONAL", "ENCODER", "HEAD", "TOKEN_TYPES"]

HEAD = "part of a task head, which embeddings do not use"
ENCODER: dict[str, Any] = {"kv_heads": {"config": (), "write": "never"}, "head_dim": no_head_dim()}
TOKEN_TYPES = Key(
    "token_types", ("type_vocab_size",), default=2, low=0, read_gguf=lambda get: get("tokenizer.ggml.token_type_count")
)
BIDIRECTIONAL = {"attention.causal": boolean(False)}

BERT = Architecture(
    name="bert",
    model_type="bert",
    class_name="BertModel",
    reads=("bert",),
    names=NameTable(
        {
            "attention.self.query": "attn_q",
            "attention.self.key": "attn_k",
            "attention.self.value": "attn_v",
            "attention.output.dense": "attn_output",
            "attention.output.LayerNorm": "attn_output_norm",
            "intermediate.dense": "ffn_up",
            "output.dense": "ffn_down",
            "output.LayerNorm": "layer_output_norm",
        },
        top={
            "embeddings.word_embeddings": "token_embd",
            "embeddings.position_embeddings": "position_embd",
            "embeddings.token_type_embeddings": "token_types",
            "embeddings.LayerNorm": "token_embd_norm",
        },
        prefix="encoder.layer.",
        bare=False,
        outer="bert.",
    ),
    hyper=replace(
        USUAL.changed(
            norm_eps=layer_norm_eps("layer_norm_eps", 1e-12), activation={"default": "gelu"}, **ENCODER, **NO_ROPE
        ).plus(TOKEN_TYPES),
        always={"position_embedding_type": "absolute"},
        metadata=BIDIRECTIONAL,
    ),
    layer=PostNormLayer(
        Attention(norm="", rope="none"),
        FeedForward(norm="", gated=False, activations=("gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu")),
    ),
    ends=Ends(positions=True, types=True, norm=True, last=False),
    norm="layer",
    biases=(Bias(("attn_q", "attn_k", "attn_v", "attn_output", "ffn_up", "ffn_down")),),
    unused={
        r"(bert\.)?pooler\..*|cls\..*|classifier\..*": HEAD,
        r"(bert\.)?embeddings\.position_ids": "counts from 0",
    },
    encoder=True,
    lacks="GGUF has no pooler: pass add_pooling_layer=False to transformers, which otherwise initializes one randomly",
)
