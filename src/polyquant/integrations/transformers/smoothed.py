"""Tensors that msModelSlim adds to a model: second weights of norms, biases of norms and linears, and cache scales."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from polyquant.architectures.record import Architecture
from polyquant.errors import UnsupportedError
from polyquant.runtime.c8 import grid_name
from polyquant.types import Checkpoint, TensorMap

__all__ = ["add_biases", "usual_names"]


def usual_names(
    checkpoint: Checkpoint, maps: Mapping[str, TensorMap], record: Architecture | None
) -> tuple[dict[str, TensorMap], list[str]]:
    """Return the maps without the second copy of each smoothed norm and without the scales of the cache, and warnings.

    Raises UnsupportedError for a norm whose two copies differ.
    """
    kept: dict[str, TensorMap] = {}
    grids = 0
    for name, tensor_map in maps.items():
        stem, _, leaf = name.rpartition(".")
        plain = f"{stem.removesuffix('.module')}.{leaf}"
        if stem.endswith(".module") and plain in maps:
            _require_equal(checkpoint, name, plain)
        elif record is not None and grid_name(record, name) is not None:
            grids += 1
        else:
            kept[name] = tensor_map
    warnings = [f"{grids} scales of the int8 cache are not used: transformers stores keys and values as floats"]
    return kept, warnings if grids else []


def _require_equal(checkpoint: Checkpoint, name: str, plain: str) -> None:
    if not np.array_equal(checkpoint[name].dequantize(), checkpoint[plain].dequantize()):
        raise UnsupportedError(
            "a norm with a different weight for quantized and float layers cannot be loaded into transformers",
            file=checkpoint.path,
            tensor=name,
            hint="use polyquant run, which applies both",
        )


def add_biases(model: Any, names: Iterable[str]) -> None:
    """Give linears and norms of an empty model the biases that only the files have."""
    modules = dict(model.named_modules())
    for name in names:
        path, _, leaf = name.rpartition(".")
        module = modules.get(path)
        weight = getattr(module, "weight", None)
        if module is None or leaf != "bias" or weight is None or getattr(module, "bias", None) is not None:
            continue
        if type(module) is not torch.nn.Linear:
            if len(weight.shape) != 1:
                continue
            module.__class__ = _biased(type(module))
        module.bias = torch.nn.Parameter(torch.empty(weight.shape[:1], dtype=weight.dtype, device=weight.device))


_classes: dict[type, type] = {}


def _biased(kind: type) -> type:
    """Return the subclass of a norm that adds a bias."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return kind.forward(self, x) + self.bias  # type: ignore[attr-defined]

    return _classes.setdefault(kind, type(f"{kind.__name__}WithBias", (kind,), {"forward": forward}))
