"""Recognise the matrices of linear layers, which folder quantizers select unless a rule names more."""

from __future__ import annotations

from polyquant.types import Shape

__all__ = ["is_linear"]

_FLOAT_PARTS = ("embed", "embd", "router")
_FLOAT_MODULES = frozenset({
    "wte", "wpe", "lm_head", "output_layer", "embed_out", "score", "classifier", "gate", "shared_expert_gate",
    "ffn_gate_inp", "ffn_gate_inp_shexp",
})  # fmt: skip


def is_linear(name: str, shape: Shape) -> bool:
    """True for a matrix of a linear layer; False for embeddings, output heads, norms, biases and routers."""
    *path, last = name.split(".")
    if len(shape) != 2 or last != "weight" or not path:
        return False
    if any(word in name for word in _FLOAT_PARTS) or path == ["output"]:
        return False
    return path[-1] not in _FLOAT_MODULES and "norm" not in path[-1]
