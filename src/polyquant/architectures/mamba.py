"""Mamba-2 (Dao and Gu 2024): h + mixer(norm(h)) in every layer, without attention or positions. See mixer.py."""

from __future__ import annotations

from dataclasses import replace

from polyquant.architectures.hybrid import NoPart
from polyquant.architectures.hyper_table import USUAL
from polyquant.architectures.keys import no_head_dim
from polyquant.architectures.mixer import (
    ANY_CONTEXT,
    MIXER_CHANGES,
    NO_ROPE,
    Mixer,
    in_pieces,
    mixer_exact,
    mixer_stems,
    product,
    ssm_keys,
)
from polyquant.architectures.names import NameTable
from polyquant.architectures.parts import Layer
from polyquant.architectures.record import Architecture, Bias

__all__ = ["MAMBA2"]

_TABLE = USUAL.changed(
    context={"config": (), "default": ANY_CONTEXT},
    feed_forward={"config": (), "default": 0, "low": 0},
    heads={"config": (), "default": 0, "low": 0},
    kv_heads={"config": (), "write": "never", "low": 0},
    norm_eps={"config": ("layer_norm_epsilon",), "default": 1e-5},
    head_dim=no_head_dim(),
    **NO_ROPE,
).plus(
    *ssm_keys(
        conv="conv_kernel",
        state="state_size",
        groups="n_groups",
        heads="num_heads",
        inner=product("num_heads", "head_dim"),
    )
)
MAMBA2 = Architecture(
    name="mamba2",
    model_type="mamba2",
    class_name="Mamba2ForCausalLM",
    reads=("mamba2",),
    names=NameTable(
        {"norm": "attn_norm", **mixer_stems("mixer")},
        exact=mixer_exact("mixer"),
        top={"backbone.embeddings": "token_embd", "backbone.norm_f": "output_norm", "lm_head": "output"},
        prefix="backbone.layers.",
    ),
    hyper=replace(_TABLE, more_config=in_pieces("head_dim", "expand")),
    changes=MIXER_CHANGES,
    layer=Layer(Mixer(), NoPart()),
    biases=(Bias(("ssm_conv1d",), "use_conv_bias"), Bias(("ssm_in", "ssm_out"), "use_bias")),
)
