"""Sliding windows as transformers reads them from config.json: for each layer how many of the last positions it attends to, 0 for all.

GGUF has a key for their size in some architectures, and which layers have one its readers know by themselves: `gguf_windows`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from polyquant.architectures.hyper import MAX_CONTEXT, MAX_LAYERS, Hyper, whole_number
from polyquant.errors import InputError

__all__ = [
    "Pattern", "Windows", "all_but_every", "gguf_windows", "in_every_layer", "in_every_layer_if_said", "layer_types", "listed_types", "listed_windows", "nowhere", "where_asked",
    "where_listed",
]  # fmt: skip

Windows: TypeAlias = Callable[[Mapping[str, Any], int, object], tuple[int, ...]]
"""(config.json, number of layers, its path) -> windows, () if no layer has one. Raises InputError."""
Pattern: TypeAlias = Callable[[int], bool]
"""True for the number of a layer that has a window."""


def nowhere(config: Mapping[str, Any], layers: int, file: object) -> tuple[int, ...]:
    """The architecture has no windows, whatever config.json says."""
    return ()


def in_every_layer(config: Mapping[str, Any], layers: int, file: object) -> tuple[int, ...]:
    """Mistral: `sliding_window` in every layer, null for none."""
    window = _size(config, file)
    return (window,) * layers if window else ()


def in_every_layer_if_said(config: Mapping[str, Any], layers: int, file: object) -> tuple[int, ...]:
    """Mixtral: as Mistral, but no window where config.json does not name one."""
    return in_every_layer(config, layers, file) if "sliding_window" in config else ()


def where_asked(config: Mapping[str, Any], layers: int, file: object) -> tuple[int, ...]:
    """Qwen: with `use_sliding_window`, where `layer_types` says so, else from layer `max_window_layers` on."""
    window = _size(config, file) if config.get("use_sliding_window") is True else 0
    if not window:
        return ()
    if (listed := _listed(config, layers, window, file)) is not None:
        return listed
    said = config.get("max_window_layers")
    first = whole_number(28 if said is None else said, "max_window_layers", MAX_LAYERS, file=file, low=0)
    return tuple(window if i >= first else 0 for i in range(layers))


def all_but_every(period: int) -> Pattern:
    """The last layer of each `period` attends to all."""
    return lambda layer: (layer + 1) % period != 0


def where_listed(pattern: Pattern, size: int = 4096) -> Windows:
    """Where `layer_types` says so, else by the pattern. size: where config.json does not name it."""

    def read(config: Mapping[str, Any], layers: int, file: object) -> tuple[int, ...]:
        window = _size({"sliding_window": size, **config}, file)
        listed = _listed(config, layers, window, file)
        return tuple(window if pattern(i) else 0 for i in range(layers)) if listed is None else listed

    return read


def gguf_windows(pattern: Pattern) -> Callable[[Hyper], tuple[int, ...]]:
    """Of the size in the row `window`, by the pattern."""
    return lambda hyper: tuple(hyper.count("window") if pattern(i) else 0 for i in range(hyper.layers))


def listed_windows(hyper: Hyper) -> tuple[int, ...]:
    """Of the size in the row `window`, in the layers of the row `sliding`, which GGUF lists."""
    sliding = hyper.more["sliding"]
    return tuple(hyper.count("window") if slides else 0 for slides in sliding) if isinstance(sliding, tuple) else ()


def listed_types(hyper: Hyper) -> dict[str, list[str]]:
    """The same as an entry of config.json."""
    sliding = hyper.more["sliding"]
    return _types(sliding if isinstance(sliding, tuple) else (), hyper.layers)


def layer_types(hyper: Hyper) -> dict[str, list[str]]:
    """The entry of config.json that says which layers have a window."""
    return _types(hyper.windows, hyper.layers)


def _types(windowed: Sequence[object], layers: int) -> dict[str, list[str]]:
    return {"layer_types": ["sliding_attention" if w else "full_attention" for w in windowed or (0,) * layers]}


def _listed(config: Mapping[str, Any], layers: int, window: int, file: object) -> tuple[int, ...] | None:
    """By `layer_types`; None if there is none."""
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
