"""ModernBERT (Warner et al. 2024): a bidirectional encoder with RoPE; gate and up in one matrix.

    h = x + attention(norm(x)), y = h + D (gelu(gate) * up), [gate, up] = Wi norm(h)

The first layer has no norm before attention. Layers with a sliding window have their own RoPE base.

Source: modeling_modernbert.py of transformers; llama.cpp's converter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from polyquant.architectures.bert import BIDIRECTIONAL, ENCODER, HEAD
from polyquant.architectures.bidirectional import LaterNorm
from polyquant.architectures.hyper import MAX_CONTEXT, Hyper, bounded_integer
from polyquant.architectures.hyper_table import USUAL, Key
from polyquant.architectures.keys import theta_of, two_ropes
from polyquant.architectures.layer_kinds import ATTENTION, words, words_of
from polyquant.architectures.names import NameTable
from polyquant.architectures.parts import Ends, FeedForward, Layer
from polyquant.architectures.record import Architecture, Bias, has
from polyquant.errors import InputError
from polyquant.gguf_values import string

__all__ = ["MODERN_BERT"]

_WINDOW, _EVERY = 128, 3
_POOLED = {"mean": 1, "cls": 2}


def _period(config: Mapping[str, Any]) -> Any:
    """Return the period of full-attention layers, which start at layer 0."""
    kinds = words(config, "layer_types")
    if kinds is None or config.get("global_attn_every_n_layers") is not None:
        return config.get("global_attn_every_n_layers")
    return next((i for i, kind in enumerate(kinds) if i and kind in ATTENTION), len(kinds))


def _windows(config: Mapping[str, Any], layers: int, file: object) -> tuple[int, ...]:
    """Return `local_attention`, half of it on either side, for layers that `layer_types` marks as sliding, by
    default two of three."""
    local = config.get("local_attention")
    size = _WINDOW if local is None else bounded_integer(local, "local_attention", MAX_CONTEXT, file=file)
    kinds = words(config, "layer_types")
    if kinds is None:
        period = _period(config) or _EVERY
        return tuple(size if i % period else 0 for i in range(layers))
    if len(kinds) != layers:
        raise InputError("layer_types cannot be right", file=file, expected=f"{layers} words", found=len(kinds))
    return tuple(0 if kind in ATTENTION else size for kind in kinds)


def _layer_entries(hyper: Hyper) -> dict[str, Any]:
    local = [i % hyper.count("window_period") for i in range(hyper.layers)]
    return {"layer_types": words_of(local, "sliding_attention", "full_attention"), **two_ropes(hyper)}


MODERN_BERT = Architecture(
    name="modern-bert",
    model_type="modernbert",
    class_name="ModernBertModel",
    reads=("modernbert",),
    names=NameTable(
        {
            "attn_norm": "attn_norm",
            "attn.Wqkv": "attn_qkv",
            "attn.Wo": "attn_output",
            "mlp_norm": "ffn_norm",
            "mlp.Wi": "ffn_up",
            "mlp.Wo": "ffn_down",
        },
        top={
            "embeddings.tok_embeddings": "token_embd",
            "embeddings.norm": "token_embd_norm",
            "final_norm": "output_norm",
        },
        prefix="layers.",
        bare=False,
        outer="model.",
    ),
    hyper=replace(
        USUAL.changed(
            rope_theta={"config": ("global_rope_theta",), "default": 160000.0,
                "read": theta_of("full_attention", "global_rope_theta")},
            norm_eps={"config": ("norm_eps",), "gguf": "attention.layer_norm_epsilon",
                "also": ("attention.layer_norm_rms_epsilon",), "default": 1e-5},
            rotated={"config": (), "gguf": None},
            vocab={"write": "always"},
            activation={"config": ("hidden_activation",), "gguf": "hidden_activation", "default": "gelu"},
            **ENCODER,
        ).plus(
            Key(
                "rope_theta_swa", ("local_rope_theta",), "rope.freq_base_swa", default=10000.0, kind="real",
                read=theta_of("sliding_attention", "local_rope_theta"),
            ),
            Key("window", ("local_attention",), "attention.sliding_window", default=_WINDOW),
            Key("window_period", ("global_attn_every_n_layers",), "attention.sliding_window_pattern", default=_EVERY,
                low=1, read=_period),
            Key(
                "classifier_pooling", ("classifier_pooling",), "classifier.pooling_type", default=2,
                read=lambda config: _POOLED.get(str(config.get("classifier_pooling"))),
                entries=lambda kind: {
                    "classifier_pooling": next((word for word, n in _POOLED.items() if n == kind), "cls")
                },
            ),
        ),
        metadata={**BIDIRECTIONAL, "rope.scaling.type": string("none")},
        more_config=_layer_entries,
        windows=_windows,
        gguf_windows=lambda hyper: tuple(
            hyper.count("window") if i % hyper.count("window_period") else 0 for i in range(hyper.layers)
        ),
    ),
    layer=Layer(
        LaterNorm(fused=True),
        FeedForward(fused=True, activations=("gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu")),
    ),
    ends=Ends(norm=True),
    norm="layer",
    biases=(
        Bias(("attn_qkv", "attn_output"), "attention_bias"),
        Bias(("ffn_up", "ffn_down"), "mlp_bias"),
    ),
    switches={"norm_bias": has("ffn_norm.bias")},
    unused={r"(head|decoder|classifier)\..*": HEAD},
    encoder=True,
)  # fmt: skip
