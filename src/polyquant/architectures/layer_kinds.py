"""Hybrid models: which layers attend, and which do something else. config.json lists a word for each layer, GGUF lists numbers: of a layer without attention
`attention.head_count_kv` is 0, of one without a feed-forward part `feed_forward_length`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from polyquant.architectures.hyper import MAX_LAYERS
from polyquant.architectures.hyper_table import Key

__all__ = ["ATTENTION", "kv_heads", "largest", "numbers", "of_windowed", "per_layer", "words", "words_of"]

ATTENTION = ("attention", "full_attention")
"""What config.json calls a layer with attention; the first word until transformers 5, the second since."""


def words(config: Mapping[str, Any], *entries: str) -> tuple[str, ...] | None:
    """The list of words under the first of these entries that there is; None without one."""
    said = next((config[e] for e in entries if config.get(e) is not None), None)
    if not isinstance(said, Sequence) or isinstance(said, str) or not all(isinstance(w, str) for w in said):
        return None
    return tuple(said)


def words_of(counts: Sequence[float], some: str, none: str) -> list[str]:
    """`some` for a layer with a count, `none` for one without."""
    return [some if n else none for n in counts]


def kv_heads(
    attends: Callable[[Mapping[str, Any]], Sequence[bool] | None], say: Callable[[Sequence[int]], Mapping[str, Any]]
) -> tuple[dict[str, Any], Key]:
    """What the row `kv_heads` is in a hybrid, and the row `layer_kv_heads`. attends: config.json -> True for each layer with attention; say: the way back."""

    def read(config: Mapping[str, Any]) -> list[Any] | None:
        where = attends(config)
        count = config.get("num_key_value_heads") or config.get("num_attention_heads")
        return None if where is None else [count if here else 0 for here in where]

    one = {"read_gguf": largest("attention.head_count_kv"), "write": "never"}
    every = Key(
        "layer_kv_heads", ("layer_types",), "attention.head_count_kv", kind="counts", read=read, say=say, read_gguf=per_layer("attention.head_count_kv"),
        each_layer=True,
    )  # fmt: skip
    return one, every


def largest(key: str) -> Callable[[Callable[..., Any]], Any]:
    """The largest entry of a list of GGUF, or its one number."""

    def read(get: Callable[..., Any]) -> Any:
        value = get(key, whole=True)
        counts = list(value) if isinstance(value, Iterable) and not isinstance(value, str) else []
        return max(counts) if counts and all(isinstance(n, int) for n in counts) else value

    return read


def per_layer(key: str) -> Callable[[Callable[..., Any]], Any]:
    """A list of GGUF; one number stands for all layers."""

    def read(get: Callable[..., Any]) -> Any:
        value, layers = get(key, whole=True), get("block_count")
        if isinstance(value, Iterable) or not isinstance(value, int) or not isinstance(layers, int):
            return value
        return [value] * min(layers, MAX_LAYERS)

    return read


def numbers(get: Callable[..., Any], key: str) -> list[Any]:
    """A number of GGUF, or one for each layer; [] for nothing."""
    value = get(key, whole=True)
    return [] if value is None else np.ravel(value).tolist()


def of_windowed(key: str, *, windowed: bool = True) -> Callable[[Callable[..., Any]], Any]:
    """The entry of a list of GGUF that layers with a window have, or the one number; windowed: False for those without one, then 0 where no list tells them apart."""

    def read(get: Callable[..., Any]) -> Any:
        found, sliding = numbers(get, key), numbers(get, "attention.sliding_window_pattern")
        own = [n for n, slides in zip(found, sliding, strict=False) if bool(slides) is windowed]
        return next(iter(own), next(iter(found), None) if windowed else 0)

    return read
