"""Sliding windows as transformers reads them from config.json: for each layer how many of the last positions it attends to, 0 for all.

GGUF has no key for them in the architectures of these records.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from polyquant.architectures.hyper import MAX_CONTEXT, MAX_LAYERS, whole_number
from polyquant.errors import InputError

__all__ = ["Windows", "in_every_layer", "nowhere", "where_asked"]

Windows: TypeAlias = Callable[[Mapping[str, Any], int, object], tuple[int, ...]]
"""(config.json, number of layers, its path) -> windows, () if no layer has one. Raises InputError."""


def nowhere(config: Mapping[str, Any], layers: int, file: object) -> tuple[int, ...]:
    """The architecture has no windows, whatever config.json says."""
    return ()


def in_every_layer(config: Mapping[str, Any], layers: int, file: object) -> tuple[int, ...]:
    """Mistral: `sliding_window` in every layer, null for none."""
    window = _size(config, file)
    return (window,) * layers if window else ()


def where_asked(config: Mapping[str, Any], layers: int, file: object) -> tuple[int, ...]:
    """Qwen: with `use_sliding_window`, where `layer_types` says so, else from layer `max_window_layers` on."""
    window = _size(config, file) if config.get("use_sliding_window") is True else 0
    if not window:
        return ()
    types = config.get("layer_types")
    if isinstance(types, Sequence) and not isinstance(types, str):
        if len(types) != layers or any(t not in ("full_attention", "sliding_attention") for t in types):
            raise InputError(
                "layer_types cannot be right", file=file, expected=f"one kind of attention for each of {layers} layers"
            )
        return tuple(window if t == "sliding_attention" else 0 for t in types)
    said = config.get("max_window_layers")
    first = whole_number(28 if said is None else said, "max_window_layers", MAX_LAYERS, file=file, low=0)
    return tuple(window if i >= first else 0 for i in range(layers))


def _size(config: Mapping[str, Any], file: object) -> int:
    size = config.get("sliding_window", 4096)  # the default of transformers where config.json does not name it
    return 0 if size is None else whole_number(size, "sliding_window", MAX_CONTEXT, file=file)
