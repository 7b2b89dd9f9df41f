"""Qwen3.5 (Qwen 2026): Qwen3-Next with a matrix for each of q, k and v together, z, a and b, and positions of three axes.

    qwen35moe     experts and a shared one          qwen35    an ordinary feed-forward part

The value heads that share a key head lie together; in GGUF the first of each key head come first, then the second of each. So do all rows, columns and
numbers that belong to them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from polyquant.architectures.changes import Change, Squeezed
from polyquant.architectures.delta_rule import delta_sizes, delta_table, turned_heads
from polyquant.architectures.hyper import Hyper
from polyquant.architectures.hyper_table import Key
from polyquant.architectures.llama import LLAMA_NAMES
from polyquant.architectures.moves import halves
from polyquant.architectures.names import NameTable
from polyquant.architectures.qwen3_next import (
    ATTENTION_STEMS,
    EXACT,
    EXPERT_KEYS,
    EXPERT_STEMS,
    FROM_ONE,
    QWEN3_NEXT,
)
from polyquant.architectures.qwen_moe import EXPERTS
from polyquant.operations import MinusExp, Operation, Rows, chain
from polyquant.types import Shape

__all__ = ["QWEN35", "QWEN35_MOE"]


def _decay(hyper: Hyper, shape: Shape) -> Operation:
    return chain(MinusExp(), _heads(hyper, shape))


def _heads(hyper: Hyper, shape: Shape) -> Operation:
    return Rows(turned_heads(hyper, 1))


def _rows(hyper: Hyper, shape: Shape) -> Operation:
    return Rows(turned_heads(hyper, delta_sizes(hyper)[3]))


def _columns(hyper: Hyper, shape: Shape) -> Operation:
    return Rows(turned_heads(hyper, delta_sizes(hyper)[3]), axis=1)


def _behind_keys(hyper: Hyper, shape: Shape) -> Operation:
    """The rows of v; those of q and k stay."""
    keys, key, _, value = delta_sizes(hyper)
    return Rows(np.concatenate([np.arange(2 * keys * key), 2 * keys * key + turned_heads(hyper, value)]))


def _kernel(hyper: Hyper, shape: Shape) -> Operation:
    return chain(Squeezed.operation(hyper, shape), _behind_keys(hyper, shape))


def _sections(config: Mapping[str, Any]) -> list[Any] | None:
    """How many pairs of a head turn with each axis of a position: three numbers and a 0."""
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    said = rope.get("mrope_section") if isinstance(rope, Mapping) else None
    return [*said, 0, 0, 0, 0][:4] if isinstance(said, list) else None


_SECTIONS = Key(
    "rope_sections", ("mrope_section",), "rope.dimension_sections", kind="counts", default=(11, 11, 10, 0), read=_sections,
    say=lambda value: {"rope_parameters": {"mrope_section": list(value[:3]), "mrope_interleaved": True}},
)  # fmt: skip
_STEMS = {
    **ATTENTION_STEMS,
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
}
_FUSED = halves("mlp.experts.gate_up_proj", "ffn_gate_exps.weight", "ffn_up_exps.weight")

QWEN35_MOE = replace(
    QWEN3_NEXT,
    name="qwen35moe",
    model_type="qwen3_5_moe_text",
    class_name="Qwen3_5MoeForCausalLM",
    reads=("qwen3_5_moe_text",),
    names=NameTable(
        {**_STEMS, **EXPERT_STEMS},
        exact={**EXACT, "mlp.experts.down_proj": "ffn_down_exps.weight"},  # with _FUSED; separate experts are written
    ),
    hyper=delta_table(
        *EXPERT_KEYS,
        _SECTIONS,
        feed_forward={"default": 0, "low": 0, "write": "where set", "say": lambda n: {"intermediate_size": n} if n else {}},
    ),
    changes={
        **FROM_ONE,
        "ssm_a": Change(_decay),
        "ssm_conv1d": Change(_kernel, Squeezed.before),
        **dict.fromkeys(("ssm_alpha", "ssm_beta", "ssm_dt.bias"), Change(_heads)),
        "attn_gate": Change(_rows),
        "attn_qkv": Change(_behind_keys),
        "ssm_out": Change(_columns),
    },
    moves=(*EXPERTS, _FUSED),
)  # fmt: skip
QWEN35 = replace(
    QWEN35_MOE,
    name="qwen35",
    model_type="qwen3_5_text",
    class_name="Qwen3_5ForCausalLM",
    reads=("qwen3_5_text",),
    names=NameTable({**_STEMS, **{k: v for k, v in LLAMA_NAMES.items() if k.startswith("mlp.")}}, exact=EXACT),
    hyper=delta_table(_SECTIONS),
    moves=(),
)
