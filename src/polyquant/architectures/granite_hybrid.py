"""Granite 4 (IBM 2025): Mamba-2 in most layers, attention in some, with Granite's four factors.

The feed-forward part is experts plus a shared expert, or the shared expert alone, which GGUF stores under ordinary
feed-forward names.

    h = x + r attention(norm(x)) or r mixer(norm(x));  y = h + r (experts(norm(h)) + shared(norm(h)))

Rows of q and k are stored interleaved although nothing rotates. The context is unlimited; GGUF declares 2^20.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from polyquant.architectures.changes import PairedRows
from polyquant.architectures.granite import FUSED
from polyquant.architectures.hybrid import attention_or
from polyquant.architectures.hyper_table import USUAL, Key
from polyquant.architectures.keys import expert_keys, granite_keys, no_head_dim, shared_expert_key
from polyquant.architectures.layer_kinds import ATTENTION, kv_heads, words, words_of
from polyquant.architectures.llama import LLAMA_NAMES
from polyquant.architectures.mixer import (
    ANY_CONTEXT,
    MIXER_CHANGES,
    Mixer,
    in_pieces,
    mixer_exact,
    mixer_stems,
    product,
    ssm_keys,
)
from polyquant.architectures.mixture import Mixture
from polyquant.architectures.moves import halves
from polyquant.architectures.names import NameTable
from polyquant.architectures.parts import Attention, Ends, FeedForward, Layer
from polyquant.architectures.record import Architecture, Bias

__all__ = ["GRANITE_HYBRID", "GRANITE_HYBRID_MOE"]


def _attends(config: Mapping[str, Any]) -> Sequence[bool] | None:
    kinds = words(config, "layer_types", "layers_block_type")
    return None if kinds is None else [kind in ATTENTION for kind in kinds]


_ONE, _EVERY = kv_heads(_attends, lambda counts: {"layer_types": words_of(counts, "attention", "mamba")})
_ROTATES = Key(
    "rotates", ("position_embedding_type",), "rope.scaling.finetuned", kind="flag", default=0,
    read=lambda config: config.get("position_embedding_type") == "rope",
    entries=lambda value: {"position_embedding_type": "rope" if value else "nope"},
)  # fmt: skip
_TABLE = USUAL.changed(
    context={"config": (), "default": ANY_CONTEXT, "entries": lambda value: {"max_position_embeddings": value}},
    kv_heads=_ONE,
    head_dim=no_head_dim(),
    vocab={"write": "always"},
    rotated={"write": "always"},
).plus(
    _EVERY,
    *expert_keys("num_local_experts", feed_forward=None),
    *granite_keys(),
    shared_expert_key("shared_intermediate_size"),
    *ssm_keys(
        conv="mamba_d_conv",
        state="mamba_d_state",
        groups="mamba_n_groups",
        heads="mamba_n_heads",
        inner=product("mamba_expand", "hidden_size"),
    ),
    _ROTATES,
)
_STEMS = {stem: name for stem, name in LLAMA_NAMES.items() if not stem.startswith("mlp.")}

GRANITE_HYBRID_MOE = Architecture(
    name="granitehybrid",
    model_type="granitemoehybrid",
    class_name="GraniteMoeHybridForCausalLM",
    reads=("granitemoehybrid",),
    requires=("num_local_experts",),
    gguf_requires=("expert_count",),
    names=NameTable(
        {
            **_STEMS,
            **mixer_stems("mamba"),
            "block_sparse_moe.router.layer": "ffn_gate_inp",
            "block_sparse_moe.output_linear": "ffn_down_exps",
            "shared_mlp.output_linear": "ffn_down_shexp",
        },
        exact=mixer_exact("mamba"),
    ),
    hyper=replace(_TABLE, more_config=in_pieces("mamba_d_head", "mamba_expand")),
    changes={**MIXER_CHANGES, "attn_q": PairedRows("heads"), "attn_k": PairedRows("kv_heads")},
    fused=FUSED,
    moves=(
        halves("block_sparse_moe.input_linear.weight", "ffn_gate_exps.weight", "ffn_up_exps.weight"),
        halves("shared_mlp.input_linear.weight", "ffn_gate_shexp.weight", "ffn_up_shexp.weight"),
    ),
    layer=Layer(attention_or(Attention(rope="if_enabled"), Mixer()), Mixture(gating="softmax_after_topk", shared=True)),
    ends=Ends(divided=True),
    biases=(
        Bias(("attn_q", "attn_k", "attn_v", "attn_output"), "attention_bias"),
        Bias(("ssm_conv1d",), "mamba_conv_bias"),
        Bias(("ssm_in", "ssm_out"), "mamba_proj_bias"),
    ),
)
GRANITE_HYBRID = replace(
    GRANITE_HYBRID_MOE,
    requires=(),
    gguf_requires=(),
    names=NameTable(
        {**_STEMS, **mixer_stems("mamba"), "shared_mlp.output_linear": "ffn_down"}, exact=mixer_exact("mamba")
    ),
    hyper=replace(GRANITE_HYBRID_MOE.hyper.without("experts", "experts_used"), always={"num_local_experts": 0}),
    fused=None,
    moves=(halves("shared_mlp.input_linear.weight", "ffn_gate.weight", "ffn_up.weight"),),
    layer=replace(GRANITE_HYBRID_MOE.layer, feed_forward=FeedForward(width="shared_feed_forward")),
)
