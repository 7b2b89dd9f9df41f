"""LFM2 (Liquid AI 2025): gated short convolutions in most layers, attention in the others. lfm2_moe.py adds experts.

    y = h + Out (c * conv1d(b * x)), [b, c, x] = In norm(h), or attention(norm(h)) with QK norms;  then W2 (silu(W1
    norm) * W3 norm)

Both Hugging Face and GGUF name the final norm after the embedding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from polyquant.architectures.changes import Squeezed
from polyquant.architectures.hybrid import attention_or
from polyquant.architectures.hyper_table import USUAL, HyperTable, Key
from polyquant.architectures.keys import no_head_dim
from polyquant.architectures.layer_kinds import kv_heads, words, words_of
from polyquant.architectures.names import NameTable
from polyquant.architectures.parts import Attention, Ends, Layer
from polyquant.architectures.record import Architecture, Bias
from polyquant.architectures.short_conv import ShortConv

__all__ = ["LFM2", "lfm2_table"]


def _attends(config: Mapping[str, Any]) -> Sequence[bool] | None:
    kinds = words(config, "layer_types")
    if kinds is not None:
        return [kind != "conv" for kind in kinds]
    listed, layers = config.get("full_attn_idxs"), config.get("num_hidden_layers")
    return [i in listed for i in range(layers)] if isinstance(listed, list) and isinstance(layers, int) else None


def _width(config: Mapping[str, Any]) -> Any:
    """Return the feed-forward width; with block_auto_adjust_ff_dim, 2/3 of the declared width times a factor, rounded
    up."""
    declared = config.get("block_ff_dim") or config.get("intermediate_size")
    factor, step = config.get("block_ffn_dim_multiplier", 1.0), config.get("block_multiple_of", 256)
    if not isinstance(declared, int) or not config.get("block_auto_adjust_ff_dim", True):
        return declared
    width = int(2 * declared / 3)
    width = int(factor * width) if isinstance(factor, int | float) else width
    return -(-width // step) * step if isinstance(step, int) and step > 0 else None


_ONE, _EVERY = kv_heads(_attends, lambda counts: {"layer_types": words_of(counts, "full_attention", "conv")})


def lfm2_table(feed_forward: Mapping[str, Any]) -> HyperTable:
    """Return the table of LFM2, dense and with experts, which differ in the row `feed_forward`."""
    return USUAL.changed(
        feed_forward=feed_forward,
        kv_heads=_ONE,
        rope_theta={"default": 1000000.0},
        norm_eps={"config": ("norm_eps",), "default": 1e-5},
        head_dim=no_head_dim(),
        vocab={"write": "always"},
        activation={"config": ()},
    ).plus(_EVERY, Key("short_conv", ("conv_L_cache",), "shortconv.l_cache", default=3))


LFM2 = Architecture(
    name="lfm2",
    model_type="lfm2",
    class_name="Lfm2ForCausalLM",
    reads=("lfm2",),
    names=NameTable(
        {
            "operator_norm": "attn_norm",
            **{f"conv.{part}": f"shortconv.{part}" for part in ("conv", "in_proj", "out_proj")},
            **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
            "self_attn.out_proj": "attn_output",
            "self_attn.q_layernorm": "attn_q_norm",
            "self_attn.k_layernorm": "attn_k_norm",
            "ffn_norm": "ffn_norm",
            "feed_forward.w1": "ffn_gate",
            "feed_forward.w2": "ffn_down",
            "feed_forward.w3": "ffn_up",
        },
        top={"model.embed_tokens": "token_embd", "model.embedding_norm": "token_embd_norm", "lm_head": "output"},
    ),
    hyper=replace(
        lfm2_table({"read": _width, "entries": lambda wide: {"intermediate_size": wide}}),
        written={"block_auto_adjust_ff_dim": False},
        tied=True,
    ),
    changes={"shortconv.conv": Squeezed},
    layer=Layer(attention_or(Attention(head_norms=True), ShortConv())),
    ends=Ends(last_stem="token_embd_norm"),
    biases=(Bias(("shortconv.in_proj", "shortconv.out_proj", "shortconv.conv"), "conv_bias"),),
)
