"""nomic-bert (Nussbaum et al. 2024): BERT with RoPE, gated feed-forward, and no biases in linears; post-norm as in
BERT.

    h = norm(x + attention(x));  y = norm(h + D (silu(G h) * U h))

Its own repository uses GPT-2's names for sizes (n_embd, ...), transformers 5 the usual ones; both are read and written.
Sources: configuration_nomic_bert.py of transformers, configuration_hf_nomic_bert.py of nomic-ai; llama.cpp's converter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from polyquant.architectures.bert import BIDIRECTIONAL, ENCODER, HEAD, TOKEN_TYPES
from polyquant.architectures.bidirectional import PostNormLayer
from polyquant.architectures.hyper_table import USUAL
from polyquant.architectures.keys import layer_norm_eps
from polyquant.architectures.names import NameTable
from polyquant.architectures.parts import Attention, Ends, FeedForward
from polyquant.architectures.record import Architecture

__all__ = ["NOMIC_BERT"]

_TRAINED = 2048
"""Trained positions of nomic's first models; their config.json declares the number after RoPE rescaling."""


def _nomic_context(config: Mapping[str, Any]) -> Any:
    declared, trained = config.get("n_positions"), config.get("max_trained_positions", _TRAINED)
    if declared is None:
        return config.get("max_position_embeddings")
    return min(declared, trained) if isinstance(declared, int) and isinstance(trained, int) else declared


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
        ).plus(TOKEN_TYPES),
        always={
            "activation_function": "swiglu", "prenorm": False, "causal": False, "qkv_proj_bias": False,
            "mlp_fc1_bias": False,
            "mlp_fc2_bias": False, "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False, "moe_every_n_layers": 0,
        },
        written={"hidden_act": "silu"},
        metadata=BIDIRECTIONAL,
    ),
    layer=PostNormLayer(Attention(norm="", fused=True), FeedForward(norm="")),
    ends=Ends(types=True, norm=True, last=False),
    norm="layer",
    unused={r"(bert\.)?pooler\..*|cls\..*|classifier\..*": HEAD},
    encoder=True,
)  # fmt: skip
