"""Nemotron-H (NVIDIA 2025): each layer is one thing, a Mamba-2 mixer, attention without positions, or an MLP. With experts: nemotron_h_moe.py.

    y = h + one of them(norm(h));  an MLP is D relu(U x)^2

Which layer is what: `layers_block_type` of transformers 5, before that a letter each in `hybrid_override_pattern`: M, * and - or E. GGUF tells it by
`attention.head_count_kv` and `feed_forward_length`, 0 where a layer has none. Rows of q and k are stored interleaved though nothing rotates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from polyquant.architectures.changes import PairedRows
from polyquant.architectures.hyper import Hyper
from polyquant.architectures.hyper_table import USUAL, Key
from polyquant.architectures.layer_kinds import ATTENTION, kv_heads, per_layer, words
from polyquant.architectures.mixer import (
    ANY_CONTEXT,
    MIXER_CHANGES,
    NO_ROPE,
    mixer_exact,
    mixer_stems,
    product,
    ssm_keys,
)
from polyquant.architectures.names import NameTable
from polyquant.architectures.parts import ConvertedOnly
from polyquant.architectures.record import Architecture, Bias
from polyquant.gguf_values import boolean, u32

__all__ = ["NEMOTRON_H"]

_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_WIDTHS = {"mlp": "intermediate_size", "moe": "moe_intermediate_size"}


def _kinds(config: Mapping[str, Any]) -> tuple[str, ...] | None:
    """A word for each layer; None if config.json says nothing that is known."""
    pattern = config.get("hybrid_override_pattern")
    if isinstance(pattern, str) and set(pattern) <= set(_LETTERS):
        return tuple(_LETTERS[letter] for letter in pattern)
    return words(config, "layers_block_type", "layer_types")


def _attends(config: Mapping[str, Any]) -> Sequence[bool] | None:
    kinds = _kinds(config)
    return None if kinds is None else [kind in ATTENTION for kind in kinds]


def _widths(config: Mapping[str, Any]) -> list[Any] | None:
    kinds = _kinds(config)
    return None if kinds is None else [config.get(_WIDTHS[kind], 0) if kind in _WIDTHS else 0 for kind in kinds]


def _said_of_layers(hyper: Hyper) -> dict[str, Any]:
    """What each layer is, and how wide an MLP."""
    kinds, experts = [], hyper.count("expert_feed_forward")
    for heads, wide in zip(hyper.value("layer_kv_heads"), hyper.value("layer_feed_forward"), strict=True):
        part = "moe" if wide == experts else "mlp"
        kinds.append("full_attention" if heads else part if wide else "linear_attention")
    letters = {kind: letter for letter, kind in _LETTERS.items()}
    mlp = next((w for w, k in zip(hyper.value("layer_feed_forward"), kinds, strict=True) if k == "mlp"), 0)
    return {
        "layers_block_type": kinds,
        "hybrid_override_pattern": "".join(letters[kind] for kind in kinds),
        "mamba_head_dim": hyper.count("ssm_inner") // max(hyper.count("ssm_heads"), 1),
        **({"intermediate_size": mlp} if mlp else {}),
    }


_ONE, _EVERY = kv_heads(_attends, lambda counts: {})
NEMOTRON_H = Architecture(
    name="nemotron_h",
    model_type="nemotron_h",
    class_name="NemotronHForCausalLM",
    reads=("nemotron_h",),
    names=NameTable(
        {
            "norm": "attn_norm",
            **mixer_stems("mixer"),
            **{f"mixer.{part}_proj": f"attn_{part}" for part in "qkv"},
            "mixer.o_proj": "attn_output",
            "mixer.up_proj": "ffn_up",
            "mixer.down_proj": "ffn_down",
        },
        exact=mixer_exact("mixer"),
        top={"backbone.embeddings": "token_embd", "backbone.norm_f": "output_norm", "lm_head": "output"},
        prefix="backbone.layers.",
    ),
    hyper=replace(
        USUAL.changed(
            layers={"read": lambda config: len(_kinds(config) or ()) or config.get("num_hidden_layers")},
            context={"config": (), "default": ANY_CONTEXT, "say": lambda value: {"max_position_embeddings": value}},
            feed_forward={"config": (), "default": 0, "low": 0, "gguf": None},
            kv_heads=_ONE,
            norm_eps={"config": ("layer_norm_epsilon",), "gguf": "attention.layer_norm_epsilon", "aliases": ("attention.layer_norm_rms_epsilon",), "default": 1e-5},
            vocab={"write": "always"},
            activation={"config": ("mlp_hidden_act",), "default": "relu2"},
            **NO_ROPE,
        ).plus(
            _EVERY,
            Key("layer_feed_forward", (), "feed_forward_length", kind="counts", read=_widths, read_gguf=per_layer("feed_forward_length"), each_layer=True),
            *ssm_keys(
                conv="conv_kernel", state="ssm_state_size", groups="n_groups", heads="mamba_num_heads", inner=product("mamba_num_heads", "mamba_head_dim")
            ),
        ),
        metadata={"rope.scaling.finetuned": boolean(False)},
        more_metadata=lambda hyper: {"rope.dimension_count": u32(hyper.hidden // max(hyper.heads, 1))},
        more_config=_said_of_layers,
    ),
    changes={**MIXER_CHANGES, "attn_q": PairedRows("heads"), "attn_k": PairedRows("kv_heads")},
    layer=ConvertedOnly(),
    biases=(Bias(("ssm_conv1d",), "use_conv_bias"), Bias(("ssm_in", "ssm_out"), "use_bias"), Bias(("ffn_up", "ffn_down"), "mlp_bias")),
    unused={r"mtp\..*": "layers that predict several tokens are not converted"},
)  # fmt: skip
