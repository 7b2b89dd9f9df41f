"""Qwen2 (biases on q, k, v) and Qwen3 (a norm on every head of q and k). Rows keep their order."""

from __future__ import annotations

from typing import Any

from polyquant.architectures.names import ATTENTION, Family

__all__ = ["QWEN2", "QWEN3"]


def _qwen2(tensors: frozenset[str]) -> dict[str, Any]:
    return {"hidden_act": "silu", "use_sliding_window": False}


def _qwen3(tensors: frozenset[str]) -> dict[str, Any]:
    return {"hidden_act": "silu", "use_sliding_window": False, "attention_bias": "blk.0.attn_q.bias" in tensors}


QWEN2 = Family("qwen2", "qwen2", "Qwen2ForCausalLM", ATTENTION, settings=_qwen2)
QWEN3 = Family(
    "qwen3",
    "qwen3",
    "Qwen3ForCausalLM",
    {**ATTENTION, "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"},
    settings=_qwen3,
)
