"""Encoders that give embeddings of texts: bidirectional, without a head. GGUF stores no pooler and no head; how tokens are pooled: pooling.py.

bert           learned positions; h = norm(x + attention(x)), y = norm(h + D gelu(U h)), biases everywhere (Devlin et al. 2018)
nomic-bert     RoPE; norms as in bert, gate and up apart, no biases of linears (Nussbaum et al. 2024)

Sources: modeling files of transformers; llama.cpp's converter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from polyquant.architectures.hyper_table import USUAL, Key
from polyquant.architectures.keys import layer_norm_eps, no_head_dim
from polyquant.architectures.mamba import NO_ROPE
from polyquant.architectures.names import NameTable
from polyquant.architectures.parts import ConvertedOnly
from polyquant.architectures.record import Architecture, Bias
from polyquant.gguf_values import boolean

__all__ = ["BERT", "BIDIRECTIONAL", "ENCODER", "HEAD", "NOMIC_BERT"]

HEAD = "belongs to a head: embeddings are made without it"
ENCODER: dict[str, Any] = {"kv_heads": {"config": (), "write": "never"}, "head_dim": no_head_dim()}
_TOKEN_TYPES = Key(
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
        ).plus(_TOKEN_TYPES),
        always={"position_embedding_type": "absolute"},
        metadata=BIDIRECTIONAL,
    ),
    layer=ConvertedOnly(),
    biases=(Bias(("attn_q", "attn_k", "attn_v", "attn_output", "ffn_up", "ffn_down")),),
    unused={
        r"(bert\.)?pooler\..*|cls\..*|classifier\..*": HEAD,
        r"(bert\.)?embeddings\.position_ids": "counts from 0",
    },
    encoder=True,
)

_TRAINED = 2048
"""Positions that the first models of nomic were trained on; their config.json says how many rescaled ones they may be given."""


def _nomic_context(config: Mapping[str, Any]) -> Any:
    said, trained = config.get("n_positions"), config.get("max_trained_positions", _TRAINED)
    if said is None:
        return config.get("max_position_embeddings")
    return min(said, trained) if isinstance(said, int) and isinstance(trained, int) else said


NOMIC_BERT = Architecture(
    name="nomic-bert",
    model_type="nomic_bert",
    class_name="NomicBertModel",
    reads=("nomic_bert",),
    names=NameTable(
        {
            "attn.Wqkv": "attn_qkv",
            "attn.out_proj": "attn_output",
            "norm1": "attn_output_norm",
            "mlp.fc11": "ffn_up",
            "mlp.fc12": "ffn_gate",
            "mlp.fc2": "ffn_down",
            "norm2": "layer_output_norm",
        },
        top={
            "embeddings.word_embeddings": "token_embd",
            "embeddings.token_type_embeddings": "token_types",
            "emb_ln": "token_embd_norm",
        },
        prefix="encoder.layers.",
        bare=False,
        outer="bert.",
    ),
    hyper=replace(
        USUAL.changed(
            layers={"config": ("num_hidden_layers", "n_layer")},
            context={"config": ("max_position_embeddings", "n_positions"), "read": _nomic_context},
            hidden={"config": ("hidden_size", "n_embd")},
            feed_forward={"config": ("intermediate_size", "n_inner")},
            heads={"config": ("num_attention_heads", "n_head")},
            rope_theta={"config": ("rope_theta", "rotary_emb_base"), "default": 1000.0},
            rotated={"config": (), "gguf": None},
            norm_eps={**layer_norm_eps("layer_norm_eps", 1e-12), "config": ("layer_norm_eps", "layer_norm_epsilon")},
            activation={"config": ()},
            **ENCODER,
        ).plus(_TOKEN_TYPES),
        always={
            "activation_function": "swiglu", "prenorm": False, "causal": False, "qkv_proj_bias": False, "mlp_fc1_bias": False,
            "mlp_fc2_bias": False, "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False,
        },
        written={"hidden_act": "silu"},
        metadata=BIDIRECTIONAL,
    ),
    layer=ConvertedOnly(),
    unused={r"(bert\.)?pooler\..*|cls\..*|classifier\..*": HEAD},
    encoder=True,
)  # fmt: skip
