"""Hyper-parameters of Gemma 4. GGUF says the widths of heads of both kinds of layers, and lists for each layer: whether it has a window, its heads of keys and values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

import numpy as np

from polyquant.architectures.gemma import GEMMA_TABLE
from polyquant.architectures.gemma3 import LOCAL_THETA, two_ropes
from polyquant.architectures.hyper import MAX_LAYERS, Hyper
from polyquant.architectures.hyper_table import Key
from polyquant.architectures.keys import expert_keys, said_count, sliding_window, softcap_key
from polyquant.architectures.windows import all_but_every, layer_types, where_listed
from polyquant.gguf_values import flags, i32s, u32
from polyquant.types import Meta

__all__ = ["GEMMA4_TABLE"]


def _sliding(config: Mapping[str, Any]) -> Any:
    """1 for each layer with a window; () where none has one."""
    windows = where_listed(all_but_every(6))(
        config, min(said_count(config, "num_hidden_layers") or 0, MAX_LAYERS), None
    )
    return tuple(int(w > 0) for w in windows) if any(windows) else ()


def _in_full(config: Mapping[str, Any], entry: str) -> Any:
    """What per_layer_config says of the layers without a window, None if nothing."""
    layers = config.get("per_layer_config")
    found = [v for v in layers.values() if isinstance(v, Mapping)] if isinstance(layers, Mapping) else []
    return next((v[entry] for v in found if entry in v), None)


def _full_head(config: Mapping[str, Any]) -> Any:
    said = config.get("global_head_dim") or _in_full(config, "head_dim")
    return said or (config.get("head_dim", 256) if "per_layer_config" in config else 512)


def _layer_kv_heads(config: Mapping[str, Any]) -> Any:
    """() where all layers have as many."""
    full = config.get("num_global_key_value_heads") if config.get("attention_k_eq_v") else None
    full, local = full or _in_full(config, "num_key_value_heads"), config.get("num_key_value_heads")
    return () if full in (None, local) else tuple(local if s else full for s in _sliding(config))


def _full_theta(config: Mapping[str, Any]) -> Any:
    rope = config.get("rope_parameters")
    full = rope.get("full_attention") if isinstance(rope, Mapping) else None
    return full.get("rope_theta") if isinstance(full, Mapping) else None


def _numbers(get: Callable[..., Any], key: str) -> tuple[Any, ...]:
    """A number, or one for each layer; () for nothing."""
    value = get(key, whole=True)
    return () if value is None else tuple(np.ravel(value).tolist())


def _listed(get: Callable[..., Any], key: str) -> tuple[Any, ...]:
    """A list with an entry for each layer; () for a number, or one that is the same everywhere."""
    found = _numbers(get, key)
    return found if any(value != found[0] for value in found) else ()


def _more_metadata(hyper: Hyper) -> dict[str, Meta]:
    first, ff = hyper.layers - hyper.count("shared_kv_layers"), hyper.feed_forward
    wide, kv_heads = hyper.count("double_wide"), cast("tuple[int, ...]", hyper.more["layer_kv_heads"])
    sliding = cast("tuple[int, ...]", hyper.more["sliding"]) or (0,) * hyper.layers
    return {
        "attention.head_count_kv": i32s(kv_heads) if kv_heads else u32(hyper.kv_heads),
        "feed_forward_length": i32s([ff * (1 + (i >= first)) for i in range(hyper.layers)]) if wide else u32(ff),
        "attention.sliding_window_pattern": flags([bool(s) for s in sliding]),
        "rope.dimension_count_swa": u32(hyper.count("head_dim_swa")),
    }


def _more_config(hyper: Hyper) -> dict[str, Any]:
    kv_heads = cast("tuple[int, ...]", hyper.more["layer_kv_heads"])
    full = [n for n, s in zip(kv_heads, cast("tuple[int, ...]", hyper.more["sliding"]), strict=False) if not s]
    return {
        **layer_types(hyper),
        **two_ropes(hyper),
        "num_global_key_value_heads": full[0] if full else None,
        "vocab_size_per_layer_input": hyper.vocab,
    }


GEMMA4_TABLE = replace(
    GEMMA_TABLE.changed(
        context={"default": 131072},
        feed_forward={
            "write": "never",
            "read_gguf": lambda get: next(iter(_numbers(get, "feed_forward_length")), None),
        },
        kv_heads={
            "write": "never",
            "read_gguf": lambda get: next(iter(_numbers(get, "attention.head_count_kv")), None),
        },
        rope_theta={"config": (), "read": _full_theta, "default": 1e6, "write": "always"},
        head_dim={"config": ("global_head_dim",), "read": _full_head},
        rotated={"config": (), "write": "always"},
    ).plus(
        replace(LOCAL_THETA, config=()),
        Key("head_dim_swa", ("head_dim",), "attention.key_length_swa", ("attention.value_length_swa",), default=256),
        Key(
            "layer_kv_heads",
            (),
            kind="counts",
            default=(),
            read=_layer_kv_heads,
            read_gguf=lambda get: _listed(get, "attention.head_count_kv"),
        ),
        Key(
            "sliding",
            (),
            kind="flags",
            default=(),
            read=_sliding,
            read_gguf=lambda get: _listed(get, "attention.sliding_window_pattern"),
        ),
        Key(
            "double_wide",
            ("use_double_wide_mlp",),
            kind="flag",
            default=0,
            read_gguf=lambda get: bool(_listed(get, "feed_forward_length")),
        ),
        Key("shared_kv_layers", ("num_kv_shared_layers",), "attention.shared_kv_layers", default=0, low=0),
        Key(
            "per_layer_input",
            ("hidden_size_per_layer_input",),
            "embedding_length_per_layer_input",
            default=0,
            low=0,
            read=lambda config: config.get("hidden_size_per_layer_input", 256) or 0,
        ),
        *expert_keys("num_experts", used="top_k_experts"),
        Key("attention_scale", (), default=1.0, kind="real"),
        softcap_key("logit_softcap", 0.0),
        sliding_window(default=512),
    ),
    tied=True,
    windows=where_listed(all_but_every(6)),
    gguf_windows=lambda hyper: tuple(hyper.count("window") * s for s in cast("tuple[int, ...]", hyper.more["sliding"])),
    more_metadata=_more_metadata,
    more_config=_more_config,
)
"""The rows; `sliding` and `layer_kv_heads` are () where all layers are alike."""
