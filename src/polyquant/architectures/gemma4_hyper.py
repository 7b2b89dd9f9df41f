"""Hyper-parameters of Gemma 4.

GGUF stores the head sizes of both kinds of layers, and per layer whether it has a sliding window and its key/value
heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

from polyquant.architectures.gemma import GEMMA_TABLE
from polyquant.architectures.gemma3 import LOCAL_THETA
from polyquant.architectures.hyper import Hyper
from polyquant.architectures.hyper_table import Key
from polyquant.architectures.keys import (
    expert_keys,
    sliding_layers_key,
    sliding_window,
    softcap_key,
    theta_of,
    two_ropes,
)
from polyquant.architectures.layer_kinds import numbers, of_windowed
from polyquant.architectures.windows import all_but_every, listed_types, listed_windows, where_listed
from polyquant.errors import UnsupportedError
from polyquant.gguf_values import flags, i32s, u32
from polyquant.types import Meta

__all__ = ["GEMMA4_TABLE"]

_PERIOD = 6


def _in_full(config: Mapping[str, Any], entry: str) -> Any:
    """Return the per_layer_config value of the layers without a window, None if absent."""
    layers = config.get("per_layer_config")
    entries = [v for v in layers.values() if isinstance(v, Mapping)] if isinstance(layers, Mapping) else []
    return next((v[entry] for v in entries if entry in v), None)


def _full_head(config: Mapping[str, Any]) -> Any:
    size = config.get("global_head_dim") or _in_full(config, "head_dim")
    return size or (config.get("head_dim", 256) if "per_layer_config" in config else 512)


def _full_kv_heads(config: Mapping[str, Any]) -> Any:
    count = config.get("num_global_key_value_heads") if config.get("attention_k_eq_v") else None
    return count or _in_full(config, "num_key_value_heads")


def _windows(config: Mapping[str, Any], layers: int, file: object) -> tuple[int, ...]:
    """Return the window per layer. Raises UnsupportedError for an encoder."""
    if config.get("use_bidirectional_attention") == "all":
        raise UnsupportedError("a bidirectional Gemma 4 is not supported", file=file)
    return where_listed(all_but_every(_PERIOD), size=512)(config, layers, file)


def _more_metadata(hyper: Hyper) -> dict[str, Meta]:
    sizes = [hyper.at(i) for i in range(hyper.layers)]
    kv_heads, widths = [s.kv_heads for s in sizes], [s.feed_forward for s in sizes]
    return {
        "attention.head_count_kv": i32s(kv_heads) if len(set(kv_heads)) > 1 else u32(hyper.kv_heads),
        "feed_forward_length": i32s(widths) if hyper.count("double_wide") else u32(hyper.feed_forward),
        "attention.sliding_window_pattern": flags([hyper.slides(i) for i in range(hyper.layers)]),
        "rope.dimension_count_swa": u32(hyper.count("head_dim_swa")),
    }


def _more_config(hyper: Hyper) -> dict[str, Any]:
    return {
        **listed_types(hyper),
        **two_ropes(hyper),
        "num_global_key_value_heads": hyper.count("full_kv_heads") or None,
        "vocab_size_per_layer_input": hyper.vocab,
    }


GEMMA4_TABLE = replace(
    GEMMA_TABLE.changed(
        context={"default": 131072},
        feed_forward={"write": "never", "read_gguf": lambda get: next(iter(numbers(get, "feed_forward_length")), None)},
        kv_heads={"write": "never", "read_gguf": of_windowed("attention.head_count_kv")},
        rope_theta={"config": (), "read": theta_of("full_attention"), "default": 1e6, "write": "always"},
        head_dim={"config": ("global_head_dim",), "read": _full_head},
        rotated={"config": (), "write": "always"},
    ).plus(
        replace(LOCAL_THETA, config=()),
        Key("head_dim_swa", ("head_dim",), "attention.key_length_swa", ("attention.value_length_swa",), default=256),
        Key("full_kv_heads", (), default=0, low=0, read=_full_kv_heads,
            read_gguf=of_windowed("attention.head_count_kv", windowed=False)),
        sliding_layers_key(_PERIOD),
        Key(
            "double_wide", ("use_double_wide_mlp",), kind="flag", default=0,
            read_gguf=lambda get: any(n != m for n, m in pairwise(numbers(get, "feed_forward_length"))),
        ),
        Key("values_are_keys", ("attention_k_eq_v",), kind="flag", default=0),
        Key("shared_kv_layers", ("num_kv_shared_layers",), "attention.shared_kv_layers", default=0, low=0),
        Key(
            "per_layer_input", ("hidden_size_per_layer_input",), "embedding_length_per_layer_input", default=0, low=0,
            read=lambda config: config.get("hidden_size_per_layer_input", 256) or 0,
        ),
        *expert_keys("num_experts", used="top_k_experts"),
        Key("attention_scale", (), default=1.0, kind="real"),
        softcap_key("logit_softcap", 0.0),
        sliding_window(default=512),
    ),
    tied=True,
    windows=_windows,
    gguf_windows=listed_windows,
    more_metadata=_more_metadata,
    more_config=_more_config,
)  # fmt: skip
