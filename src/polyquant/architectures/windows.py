"""Sliding windows as transformers reads them from config.json: per layer, how many of the last positions it attends to,
0 for all.

In some architectures GGUF has a key for the window size, but readers assume which layers have one: `gguf_windows`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from polyquant.architectures.hyper import MAX_CONTEXT, MAX_LAYERS, Hyper, bounded_integer
from polyquant.errors import InputError

__all__ = [
    "Pattern", "Windows", "all_but_every", "gguf_windows", "in_every_layer", "in_every_layer_if_present", "layer_types",
    "listed_types", "listed_windows", "no_windows", "where_enabled",
    "where_listed",
]  # fmt: skip

Windows: TypeAlias = Callable[[Mapping[str, Any], int, object], tuple[int, ...]]
"""(config.json, number of layers, its path) -> windows, () if no layer has one. Raises InputError."""
Pattern: TypeAlias = Callable[[int], bool]
"""True for the index of a layer with a window."""


def no_windows(config: Mapping[str, Any], layers: int, file: object) -> tuple[int, ...]:
    """Return (): the architecture has no windows, regardless of config.json."""
    return ()


def in_every_layer(config: Mapping[str, Any], layers: int, file: object) -> tuple[int, ...]:
    """Mistral: `sliding_window` in every layer, null for none."""
    window = _size(config, file)
    return (window,) * layers if window else ()


def in_every_layer_if_present(config: Mapping[str, Any], layers: int, file: object) -> tuple[int, ...]:
    """Mixtral: as Mistral, but without a window if config.json has no `sliding_window`."""
    return in_every_layer(config, layers, file) if "sliding_window" in config else ()


def where_enabled(config: Mapping[str, Any], layers: int, file: object) -> tuple[int, ...]:
    """Qwen: with `use_sliding_window`, the layers in `layer_types`, otherwise those from `max_window_layers` on."""
    window = _size(config, file) if config.get("use_sliding_window") is True else 0
    if not window:
        return ()
    if (listed := _listed(config, layers, window, file)) is not None:
        return listed
    first_windowed = config.get("max_window_layers")
    first = bounded_integer(
        28 if first_windowed is None else first_windowed, "max_window_layers", MAX_LAYERS, file=file, low=0
    )
    return tuple(window if i >= first else 0 for i in range(layers))


def all_but_every(period: int) -> Pattern:
    """Return a pattern where the last layer of each `period` has full attention."""
    return lambda layer: (layer + 1) % period != 0


def where_listed(pattern: Pattern, size: int = 4096) -> Windows:
    """Return a reader: the layers in `layer_types`, otherwise the pattern. size: the default window size."""

    def read(config: Mapping[str, Any], layers: int, file: object) -> tuple[int, ...]:
        window = _size({"sliding_window": size, **config}, file)
        listed = _listed(config, layers, window, file)
        return tuple(window if pattern(i) else 0 for i in range(layers)) if listed is None else listed

    return read


def gguf_windows(pattern: Pattern) -> Callable[[Hyper], tuple[int, ...]]:
    """Return windows of the size in the row `window`, by the pattern."""
    return lambda hyper: tuple(hyper.count("window") if pattern(i) else 0 for i in range(hyper.layers))


def listed_windows(hyper: Hyper) -> tuple[int, ...]:
    """Return windows of the size in the row `window`, in the layers of the row `sliding`, which GGUF lists."""
    sliding = hyper.more["sliding"]
    return tuple(hyper.count("window") if slides else 0 for slides in sliding) if isinstance(sliding, tuple) else ()


def listed_types(hyper: Hyper) -> dict[str, list[str]]:
    """Return `layer_types` of config.json, from the row `sliding`."""
    sliding = hyper.more["sliding"]
    return _types(sliding if isinstance(sliding, tuple) else (), hyper.layers)


def layer_types(hyper: Hyper) -> dict[str, list[str]]:
    """Return `layer_types` of config.json, from the windows."""
    return _types(hyper.windows, hyper.layers)


def _types(windowed: Sequence[object], layers: int) -> dict[str, list[str]]:
    return {"layer_types": ["sliding_attention" if w else "full_attention" for w in windowed or (0,) * layers]}


def _listed(config: Mapping[str, Any], layers: int, window: int, file: object) -> tuple[int, ...] | None:
    """Return windows by `layer_types`; None if it is absent."""
    types = config.get("layer_types")
    if not isinstance(types, Sequence) or isinstance(types, str):
        return None
    if len(types) != layers or any(t not in ("full_attention", "sliding_attention") for t in types):
        raise InputError(
            "layer_types cannot be right", file=file, expected=f"one kind of attention for each of {layers} layers"
        )
    return tuple(window if t == "sliding_attention" else 0 for t in types)


def _size(config: Mapping[str, Any], file: object) -> int:
    size = config.get("sliding_window", 4096)  # the default of transformers
    return 0 if size is None else bounded_integer(size, "sliding_window", MAX_CONTEXT, file=file)
