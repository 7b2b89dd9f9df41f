"""Typed metadata values: GGUF stores a type with each."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

__all__ = ["Kind", "Meta"]


class Kind(IntEnum):
    """GGUF metadata value types, by their number in the file."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


@dataclass(frozen=True, slots=True)
class Meta:
    """A metadata value with its stored type.

    For arrays `item` is the element type and value a sequence (maybe lazy).
    """

    kind: Kind
    value: Any
    item: Kind | None = None
