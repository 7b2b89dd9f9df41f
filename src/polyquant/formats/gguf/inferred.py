"""GGUF metadata from Python values: infer each value's type as llama.cpp's converter would choose it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from polyquant.errors import PlanError, printable
from polyquant.formats.gguf.header import Metadata
from polyquant.formats.gguf.values import NumberArray, StringArray
from polyquant.types import Kind, Meta

__all__ = ["inferred"]

_KINDS = {
    "bool": Kind.BOOL, "uint8": Kind.UINT8, "int8": Kind.INT8, "uint16": Kind.UINT16, "int16": Kind.INT16,
    "uint32": Kind.UINT32, "int32": Kind.INT32, "uint64": Kind.UINT64, "int64": Kind.INT64,
    "float32": Kind.FLOAT32, "float64": Kind.FLOAT64,
}  # fmt: skip
"""numpy dtype name -> GGUF type."""


def inferred(metadata: Mapping[str, Any]) -> dict[str, Meta]:
    """Key -> typed value. Raises PlanError for a key that is set by the layout, and for a value without a GGUF type."""
    if isinstance(metadata, Metadata):
        return dict(metadata.items_typed())
    for key in metadata:
        if not isinstance(key, str) or key == "general.alignment" or key.startswith("split."):
            raise PlanError(f"the metadata key '{printable(key)}' cannot be chosen", hint="omit it")
    return {key: _typed(key, value) for key, value in metadata.items()}


def _typed(key: str, value: Any) -> Meta:
    if isinstance(value, Meta):
        return value
    if isinstance(value, NumberArray):
        return Meta(Kind.ARRAY, value, value.kind)
    if isinstance(value, np.generic) and value.dtype.name in _KINDS:
        return Meta(_KINDS[value.dtype.name], value.item())
    if isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.name in _KINDS:
        return Meta(Kind.ARRAY, value.tolist(), _KINDS[value.dtype.name])
    if isinstance(value, list | tuple | StringArray):
        return Meta(Kind.ARRAY, value, _item(key, value))
    return Meta(_scalar(key, value), value)


def _scalar(key: str, value: Any) -> Kind:
    """uint32 for a count; wider or signed if necessary."""
    if isinstance(value, bool):
        return Kind.BOOL
    if isinstance(value, int):
        fitting = ((Kind.UINT32, 0, 1 << 32), (Kind.INT32, -(1 << 31), 0), (Kind.INT64, -(1 << 63), 1 << 63))
        return next((kind for kind, low, end in fitting if low <= value < end), Kind.UINT64)
    if isinstance(value, float):
        return Kind.FLOAT32
    if isinstance(value, str):
        return Kind.STRING
    raise _refusal(key, value)


def _item(key: str, values: Sequence[Any]) -> Kind:
    """The common type of all items: int32 for integers, as in llama.cpp's converter."""
    if isinstance(values, StringArray):
        return Kind.STRING
    kinds = {type(value) for value in values}
    if kinds == {str}:
        return Kind.STRING
    if kinds == {bool}:
        return Kind.BOOL
    if kinds == {int}:
        return Kind.INT32 if all(-(1 << 31) <= value < 1 << 31 for value in values) else Kind.INT64
    if kinds and kinds <= {int, float}:
        return Kind.FLOAT32
    raise _refusal(key, values)


def _refusal(key: str, value: Any) -> PlanError:
    return PlanError(
        f"the type of the metadata value '{printable(key)}' cannot be inferred",
        expected="text, a number, a bool, or a list of one of them",
        found=type(value).__name__,
        hint="pass a polyquant.Meta",
    )
