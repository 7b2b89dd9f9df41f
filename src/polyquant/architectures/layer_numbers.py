"""One-element tensors per layer that GGUF stores as a metadata list (the activation of Apertus)."""

from __future__ import annotations

import numpy as np

from polyquant.architectures.record import Architecture, LayerNumber
from polyquant.errors import InputError
from polyquant.gguf_values import f32s
from polyquant.types import F32, Checkpoint, Meta

__all__ = ["find", "lists", "metadata", "tensors"]


def find(name: str, record: Architecture) -> LayerNumber | None:
    """Return the record's entry for a Hugging Face tensor of this name."""
    place = record.names.within(name) if record.layer_numbers else None
    return record.layer_numbers.get(place[1]) if place else None


def lists(checkpoint: Checkpoint, record: Architecture, layers: int) -> dict[str, list[float]]:
    """Return GGUF key -> values of all layers, from either naming.

    Raises InputError if a layer's value is missing or a list's length is wrong.
    """
    of = _of_metadata if checkpoint.naming == "gguf" else _of_tensors
    return {n.key: of(checkpoint, record, inside, n, layers) for inside, n in record.layer_numbers.items()}


def _of_tensors(
    checkpoint: Checkpoint, record: Architecture, inside: str, number: LayerNumber, layers: int
) -> list[float]:
    names = _names(record, inside, layers, checkpoint)
    if missing := [n for n in names if n not in checkpoint or checkpoint[n].shape != number.shape]:
        raise InputError("a layer lacks this scalar", file=checkpoint.path, tensor=missing[0])
    return [float(np.asarray(checkpoint[n].dequantize()).reshape(())) for n in names]


def _of_metadata(
    checkpoint: Checkpoint, record: Architecture, inside: str, number: LayerNumber, layers: int
) -> list[float]:
    values = checkpoint.metadata.get(number.key)
    if values is None or isinstance(values, str | int | float) or len(values) != layers:
        raise InputError(
            f"{number.key} cannot be right", file=checkpoint.path, expected=f"a value for each of {layers} layers"
        )
    return [float(value) for value in values]


def metadata(checkpoint: Checkpoint, record: Architecture, layers: int) -> dict[str, Meta]:
    """Return the lists of a Hugging Face checkpoint. Raises as `lists`."""
    return {key: f32s(values) for key, values in lists(checkpoint, record, layers).items()}


def _names(record: Architecture, inside: str, layers: int, checkpoint: Checkpoint) -> list[str]:
    """Return the names as the checkpoint spells them: a bare decoder lacks the root prefix."""
    full = [f"{record.names.prefix}{i}.{inside}" for i in range(layers)]
    by_full = {record.names.full(name): name for name in checkpoint}
    return [by_full.get(name, name) for name in full]


def tensors(checkpoint: Checkpoint, record: Architecture, layers: int) -> dict[str, F32]:
    """Return the Hugging Face tensors made from the lists of a GGUF file. Raises as `lists`."""
    numbers = lists(checkpoint, record, layers)
    return {
        f"{record.names.prefix}{i}.{inside}": np.full(number.shape, value, np.float32)
        for inside, number in record.layer_numbers.items()
        for i, value in enumerate(numbers[number.key])
    }
