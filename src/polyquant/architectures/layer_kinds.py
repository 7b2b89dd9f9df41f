"""Per-layer settings of hybrid models, such as which layers have attention.

config.json lists a word per layer, GGUF lists numbers: `attention.head_count_kv` is 0 for a layer without attention,
`feed_forward_length` is 0 for one without a feed-forward part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from polyquant.architectures.hyper import MAX_LAYERS
from polyquant.architectures.hyper_table import Key

__all__ = ["ATTENTION", "kv_heads", "largest", "numbers", "of_windowed", "per_layer", "words", "words_of"]

ATTENTION = ("attention", "full_attention")
"""config.json's words for a layer with attention: before transformers 5, and since."""


def words(config: Mapping[str, Any], *entries: str) -> tuple[str, ...] | None:
    """Return the list of words under the first of these entries that is present; None without one."""
    listed = next((config[e] for e in entries if config.get(e) is not None), None)
    if not isinstance(listed, Sequence) or isinstance(listed, str) or not all(isinstance(w, str) for w in listed):
        return None
    return tuple(listed)


def words_of(counts: Sequence[float], some: str, none: str) -> list[str]:
    """Return `some` for each layer with a nonzero count, `none` for the others."""
    return [some if n else none for n in counts]


def kv_heads(
    attends: Callable[[Mapping[str, Any]], Sequence[bool] | None], entries: Callable[[Sequence[int]], Mapping[str, Any]]
) -> tuple[dict[str, Any], Key]:
    """Return the changes of the row `kv_heads` in a hybrid, and the row `layer_kv_heads`.

    attends: config.json -> True for each layer with attention. entries: the inverse.
    """

    def read(config: Mapping[str, Any]) -> list[Any] | None:
        attention = attends(config)
        count = config.get("num_key_value_heads") or config.get("num_attention_heads")
        return None if attention is None else [count if has_attention else 0 for has_attention in attention]

    one = {"read_gguf": largest("attention.head_count_kv"), "write": "never"}
    every = Key(
        "layer_kv_heads", ("layer_types",), "attention.head_count_kv", kind="counts", read=read, entries=entries,
        read_gguf=per_layer("attention.head_count_kv"), each_layer=True,
    )  # fmt: skip
    return one, every


def largest(key: str) -> Callable[[Callable[..., Any]], Any]:
    """Return a reader of the largest entry of a GGUF list, or of a single value."""

    def read(get: Callable[..., Any]) -> Any:
        value = get(key, raw=True)
        counts = list(value) if isinstance(value, Iterable) and not isinstance(value, str) else []
        return max(counts) if counts and all(isinstance(n, int) for n in counts) else value

    return read


def per_layer(key: str) -> Callable[[Callable[..., Any]], Any]:
    """Return a reader of a GGUF list; a single value applies to all layers."""

    def read(get: Callable[..., Any]) -> Any:
        value, layers = get(key, raw=True), get("block_count")
        if isinstance(value, Iterable) or not isinstance(value, int) or not isinstance(layers, int):
            return value
        return [value] * min(layers, MAX_LAYERS)

    return read


def numbers(get: Callable[..., Any], key: str) -> list[Any]:
    """Return a GGUF value or list as a list; [] if absent."""
    value = get(key, raw=True)
    return [] if value is None else np.ravel(value).tolist()


def of_windowed(key: str, *, windowed: bool = True) -> Callable[[Callable[..., Any]], Any]:
    """Return a reader of the GGUF entry that applies to sliding-window layers, or of a single value.

    windowed: False for the other layers; then 0 if no list distinguishes them.
    """

    def read(get: Callable[..., Any]) -> Any:
        values, sliding = numbers(get, key), numbers(get, "attention.sliding_window_pattern")
        own = [n for n, slides in zip(values, sliding, strict=False) if bool(slides) is windowed]
        return next(iter(own), next(iter(values), None) if windowed else 0)

    return read
