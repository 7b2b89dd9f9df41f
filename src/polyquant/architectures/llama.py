"""Llama and Mistral: one GGUF architecture, `llama`. Its q and k rows are stored interleaved."""

from __future__ import annotations

from typing import Any

from polyquant.architectures.names import ATTENTION, Family

__all__ = ["LLAMA"]


def _settings(tensors: frozenset[str]) -> dict[str, Any]:
    return {
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
    }


LLAMA = Family(
    architecture="llama",
    model_type="llama",
    class_name="LlamaForCausalLM",
    blocks=ATTENTION,
    interleaved=True,
    says_sizes=True,
    settings=_settings,
)
