"""MiniCPM (Hu et al. 2024): Llama with factors on the embedding and on each part's output, and a divisor of the logits.

The modeling code is on the hub, not in transformers. It equals Granite with embedding_multiplier = scale_emb,
residual_multiplier = scale_depth / sqrt(layers), logits_scaling = hidden / dim_model_base and attention_multiplier = 1
/ sqrt(d).

Source: modeling_minicpm.py of openbmb/MiniCPM-2B-sft-bf16; llama.cpp's converter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from polyquant.architectures import rope
from polyquant.architectures.hyper import Hyper
from polyquant.architectures.hyper_table import USUAL, Key
from polyquant.architectures.llama import LLAMA
from polyquant.architectures.parts import Ends

__all__ = ["MINICPM"]


def _short(value: float) -> float:
    """Return the shortest decimal of the float32 stored in GGUF."""
    with np.errstate(over="ignore"):  # infinity is rejected when the row is read
        return float(rope.shortest(float(np.float32(value))))


def _depth(config: Mapping[str, Any]) -> Any:
    """Return scale_depth / sqrt(layers)."""
    depth, layers = config.get("scale_depth", 1.0), config.get("num_hidden_layers", 1)
    return _short(depth / math.sqrt(layers)) if _positive(depth, layers) else depth


def _width(config: Mapping[str, Any]) -> Any:
    """Return hidden / dim_model_base."""
    hidden, base = config.get("hidden_size", 1), config.get("dim_model_base", 1)
    return _short(hidden / base) if _positive(hidden, base) else base


def _positive(*values: object) -> bool:
    return all(isinstance(v, int | float) and not isinstance(v, bool) and v > 0 for v in values)


def _config(hyper: Hyper) -> dict[str, Any]:
    residual, logits = hyper.real("residual_scale", 1.0), hyper.real("logit_scale", 1.0)
    root = math.sqrt(hyper.layers)
    return {
        "scale_depth": _rounded(residual * root, lambda depth: _short(depth / root) == residual),
        "dim_model_base": _rounded(hyper.hidden / logits, lambda base: _short(hyper.hidden / base) == logits),
    }


def _rounded(value: float, fits: Callable[[float], bool]) -> float:
    """Round to the fewest decimals that fit: 1.4, not 1.3999999."""
    rounded = next((short for digits in range(1, 17) if (short := round(value, digits)) and fits(short)), value)
    return int(rounded) if rounded.is_integer() else rounded


def _old(key: str, default: Callable[[Callable[..., Any]], float]) -> Callable[[Callable[..., Any]], Any]:
    """Return a reader with a fallback: the first GGUF files lack the factors, which are then those of the first
    models."""
    return lambda get: default(get) if get(key) is None else get(key)


_SCALES = (
    Key("embedding_scale", ("scale_emb",), "embedding_scale", default=1.0, kind="real",
        read_gguf=_old("embedding_scale", lambda get: 12.0)),
    Key(
        "residual_scale", (), "residual_scale", default=1.0, kind="real", read=_depth,
        read_gguf=_old("residual_scale", lambda get: 1.4 / math.sqrt(get("block_count") or 1)),
    ),
    Key(
        "logit_scale", (), "logit_scale", default=1.0, kind="real", read=_width,
        read_gguf=_old("logit_scale", lambda get: (get("embedding_length") or 256) / 256),
    ),
)  # fmt: skip

MINICPM = replace(
    LLAMA,
    name="minicpm",
    model_type="minicpm",
    class_name="MiniCPMForCausalLM",
    reads=("minicpm",),
    hyper=replace(USUAL.changed(rope_theta={"write": "unless default"}).plus(*_SCALES), tied=True, more_config=_config),
    ends=Ends(divided=True),
    biases=(),
)
