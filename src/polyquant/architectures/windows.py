"""Sliding windows as transformers reads them from config.json: for each layer how many of the last positions it attends to, 0 for all.

Where GGUF has a key it says the size alone: which layers have the window is known of the architecture (`all_but_each`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from polyquant.architectures.hyper import MAX_CONTEXT, MAX_LAYERS, whole_number
from polyquant.errors import InputError

__all__ = [
    "Windows",
    "all_but_each",
    "in_every_layer",
    "in_every_layer_if_said",
    "layer_types",
    "nowhere",
    "where_asked",
]

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
    if (said := _by_types(config, layers, window, file)) is not None:
        return said
    said = config.get("max_window_layers")
    first = whole_number(28 if said is None else said, "max_window_layers", MAX_LAYERS, file=file, low=0)
    return tuple(window if i >= first else 0 for i in range(layers))


def in_every_layer_if_said(config: Mapping[str, Any], layers: int, file: object) -> tuple[int, ...]:
    """Mixtral: as Mistral, but no window where config.json does not name one."""
    return in_every_layer(config, layers, file) if "sliding_window" in config else ()


def all_but_each(period: int, size: int = 4096) -> Windows:
    """`sliding_window` where `layer_types` says so, else in all layers but each `period`-th. size: where config.json says none."""

    def read(config: Mapping[str, Any], layers: int, file: object) -> tuple[int, ...]:
        window = _size({"sliding_window": size, **config}, file)
        if not window:
            return ()
        said = _by_types(config, layers, window, file)
        return said if said is not None else tuple(0 if (i + 1) % period == 0 else window for i in range(layers))

    return read


def layer_types(windows: Sequence[int]) -> dict[str, list[str]]:
    """What config.json says of these windows."""
    return {"layer_types": ["sliding_attention" if w else "full_attention" for w in windows]} if windows else {}


def _by_types(config: Mapping[str, Any], layers: int, window: int, file: object) -> tuple[int, ...] | None:
    """Windows of the layers that `layer_types` calls so; None where it says nothing."""
    types = config.get("layer_types")
    if not isinstance(types, Sequence) or isinstance(types, str):
        return None
    if len(types) != layers or any(t not in ("full_attention", "sliding_attention") for t in types):
        raise InputError(
            "layer_types cannot be right", file=file, expected=f"one kind of attention for each of {layers} layers"
        )
    return tuple(window if t == "sliding_attention" else 0 for t in types)


def _size(config: Mapping[str, Any], file: object) -> int:
    size = config.get("sliding_window", 4096)  # the default of transformers where config.json does not name it
    return 0 if size is None else whole_number(size, "sliding_window", MAX_CONTEXT, file=file)
