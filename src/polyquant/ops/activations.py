"""Activations between the matrices of a feed-forward part: numpy references and their native counterparts, in float32.

gelu, gelu_tanh: Hendrycks & Gimpel 2016, exact and the tanh approximation. silu: x / (1 + e^-x). relu2: max(x, 0)^2 (So
et al. 2021). xielu: Huang et al. 2024.
"""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

import numpy as np

from polyquant.ops import exact
from polyquant.ops.arithmetic import exp, fast_kernels, is_defined
from polyquant.ops.native import empty
from polyquant.types import F32

__all__ = ["ACTIVATIONS", "Kind", "activate", "gated", "xielu"]

Kind: TypeAlias = Literal["silu", "relu2", "gelu", "gelu_tanh", "relu"]
_CODES: dict[Kind, int] = {"silu": 0, "relu2": 1, "gelu": 2, "gelu_tanh": 3, "relu": 4}

ACTIVATIONS: dict[str, Kind] = {
    "silu": "silu",
    "swish": "silu",
    "relu2": "relu2",
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
"""The names used in config.json."""


def gated(kind: Kind, gate: F32, up: F32) -> F32:
    """Return f(gate) * up, elementwise; both of the same shape."""
    if (native := fast_kernels()) is not None:
        out = empty(*gate.shape)
        native.gate(gate, up, out, _CODES[kind])
        return out
    return np.asarray(_reference(kind, gate) * up, np.float32)


def activate(kind: Kind, x: F32) -> F32:
    """Return f(x), elementwise."""
    if (native := fast_kernels()) is not None:
        out = empty(*x.shape)
        native.gate(x, None, out, _CODES[kind])
        return out
    return np.asarray(_reference(kind, x), np.float32)


def xielu(x: F32, positive: float, negative: float, beta: float, eps: float) -> F32:
    """Return positive x^2 + beta x where x > 0, else negative (e^min(x, eps) - 1 - x) + beta x."""
    if (native := fast_kernels()) is not None:
        out = empty(*x.shape)
        native.xielu(x, out, positive, negative, beta, eps)
        return out
    wide = x.astype(np.float64)
    low = np.minimum(wide, eps)
    grown = (exact.exp(low) - 1.0 if is_defined() else np.expm1(low)) - wide
    return np.asarray(np.where(x > 0, positive * wide * wide, negative * grown) + beta * wide, np.float32)


def _reference(kind: Kind, x: F32) -> F32:
    with np.errstate(over="ignore"):
        if kind == "silu":
            return np.asarray(x / (1 + exp(-x)), np.float32)
        if kind == "gelu":
            erfc = exact.erfc if is_defined() else _erfc
            return np.asarray(x * (0.5 * erfc(-x.astype(np.float64) * math.sqrt(0.5))), np.float32)
        if kind == "gelu_tanh":
            wide = x.astype(np.float64)
            u = math.sqrt(2 / math.pi) * (wide + 0.044715 * (wide * wide * wide))
            return np.asarray(x / (1 + exp(-2 * u)), np.float32)
    positive = np.maximum(x, np.float32(0))
    return positive if kind == "relu" else np.square(positive)


_erfc = np.vectorize(math.erfc, otypes=[np.float64])
