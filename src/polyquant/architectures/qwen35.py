"""Qwen3.5 (Qwen 2026): Qwen3-Next with separate matrices for qkv, z, a and b, and three-axis positions.

    qwen35moe     experts and a shared expert       qwen35    a dense feed-forward part

GGUF orders the value heads differently: value_heads.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from polyquant.architectures.delta_rule import DeltaRule, delta_table
from polyquant.architectures.fused import Fused
from polyquant.architectures.hybrid import attention_or
from polyquant.architectures.hyper_table import Key
from polyquant.architectures.llama import LLAMA_NAMES
from polyquant.architectures.moves import halves
from polyquant.architectures.names import NameTable
from polyquant.architectures.parts import Layer
from polyquant.architectures.qwen3_next import (
    ATTENTION_STEMS,
    EXACT,
    EXPERT_KEYS,
    EXPERT_STEMS,
    EXPERTS_BEHIND,
    FROM_ONE,
    GATED,
    QWEN3_NEXT,
)
from polyquant.architectures.qwen_moe import EXPERTS
from polyquant.architectures.value_heads import VALUE_HEADS

__all__ = ["QWEN35", "QWEN35_MOE"]


def _sections(config: Mapping[str, Any]) -> list[Any] | None:
    """Return the rotary pairs per position axis: three counts and a 0."""
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    sections = rope.get("mrope_section") if isinstance(rope, Mapping) else None
    return [*sections, 0, 0, 0, 0][:4] if isinstance(sections, list) else None


_SECTIONS = Key(
    "rope_sections", ("mrope_section",), "rope.dimension_sections", kind="counts", default=(11, 11, 10, 0),
    read=_sections,
    entries=lambda value: {"rope_parameters": {"mrope_section": list(value[:3]), "mrope_interleaved": True}},
)  # fmt: skip
_STEMS = {
    **ATTENTION_STEMS,
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
}
_JOINED = halves("mlp.experts.gate_up_proj", "ffn_gate_exps.weight", "ffn_up_exps.weight")

QWEN35_MOE = replace(
    QWEN3_NEXT,
    name="qwen35moe",
    model_type="qwen3_5_moe_text",
    class_name="Qwen3_5MoeForCausalLM",
    reads=("qwen3_5_moe_text",),
    names=NameTable(
        {**_STEMS, **EXPERT_STEMS},
        exact={**EXACT, "mlp.experts.down_proj": "ffn_down_exps.weight"},  # with _JOINED; separate experts are written
    ),
    hyper=delta_table(
        *EXPERT_KEYS,
        _SECTIONS,
        feed_forward={"default": 0, "low": 0, "write": "where set",
            "entries": lambda n: {"intermediate_size": n} if n else {}},
    ),
    changes={**FROM_ONE, **VALUE_HEADS},
    moves=(*EXPERTS, _JOINED),
    fused=Fused("mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.switch_mlp", "mlp.experts.{e}.{part}"),
    layer=Layer(attention_or(GATED, DeltaRule(tiled=True)), EXPERTS_BEHIND),
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
    fused=None,
    layer=replace(QWEN35_MOE.layer, feed_forward=EXPERTS_BEHIND.dense),
)
