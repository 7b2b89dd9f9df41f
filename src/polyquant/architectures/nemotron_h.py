"""Nemotron-H (NVIDIA 2025): each layer is a Mamba-2 mixer, attention without positions, or an MLP. nemotron_h_moe.py
adds experts.

    y = h + part(norm(h));  an MLP is D relu(U x)^2

config.json lists the kind of each layer: as words in `layers_block_type` (transformers 5), before that as letters in
`hybrid_override_pattern`: M, * and - or E. GGUF expresses it by `attention.head_count_kv` and `feed_forward_length`, 0
in layers without that part. Rows of q and k are stored interleaved although nothing rotates.
"""

from __future__ import annotations

from dataclasses import replace

from polyquant.architectures.changes import PairedRows
from polyquant.architectures.hyper_table import USUAL, Key
from polyquant.architectures.layer_kinds import kv_heads, per_layer
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
from polyquant.architectures.nemotron_h_layers import (
    attending,
    kinds_of_layers,
    layer_entries,
    one_part_layer,
    widths_of_layers,
)
from polyquant.architectures.parts import FeedForward
from polyquant.architectures.record import Architecture, Bias
from polyquant.gguf_values import boolean, u32

__all__ = ["MLP", "NEMOTRON_H"]

MLP = FeedForward(gated=False, norm="attn_norm", activations=("relu2",), width="layer_feed_forward")
_ONE, _EVERY = kv_heads(attending, lambda counts: {})
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
            layers={"read": lambda config: len(kinds_of_layers(config) or ()) or config.get("num_hidden_layers")},
            context={"config": (), "default": ANY_CONTEXT, "entries": lambda value: {"max_position_embeddings": value}},
            feed_forward={"config": (), "default": 0, "low": 0, "gguf": None},
            kv_heads=_ONE,
            norm_eps={"config": ("layer_norm_epsilon",), "gguf": "attention.layer_norm_epsilon",
                "aliases": ("attention.layer_norm_rms_epsilon",), "default": 1e-5},
            vocab={"write": "always"},
            activation={"config": ("mlp_hidden_act",), "default": "relu2"},
            **NO_ROPE,
        ).plus(
            _EVERY,
            Key("layer_feed_forward", (), "feed_forward_length", kind="counts", read=widths_of_layers,
                read_gguf=per_layer("feed_forward_length"), each_layer=True),
            *ssm_keys(
                conv="conv_kernel", state="ssm_state_size", groups="n_groups", heads="mamba_num_heads",
                inner=product("mamba_num_heads", "mamba_head_dim")
            ),
        ),
        metadata={"rope.scaling.finetuned": boolean(False)},
        more_metadata=lambda hyper: {"rope.dimension_count": u32(hyper.hidden // max(hyper.heads, 1))},
        more_config=layer_entries,
    ),
    changes={**MIXER_CHANGES, "attn_q": PairedRows("heads"), "attn_k": PairedRows("kv_heads")},
    layer=one_part_layer(MLP),
    biases=(Bias(("ssm_conv1d",), "use_conv_bias"), Bias(("ssm_in", "ssm_out"), "use_bias"),
        Bias(("ffn_up", "ffn_down"), "mlp_bias")),
    unused={r"mtp\..*": "multi-token prediction (MTP) layers are not converted"},
)  # fmt: skip
