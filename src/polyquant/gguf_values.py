"""GGUF metadata values with the types that llama.cpp's converter gives them."""

from __future__ import annotations

from collections.abc import Sequence

from polyquant.types import Kind, Meta

__all__ = ["boolean", "f32", "f32s", "flags", "i32s", "string", "strings", "u32"]


def u32(value: int) -> Meta:
    """A uint32: count, size, token id."""
    return Meta(Kind.UINT32, value)


def f32(value: float) -> Meta:
    """A float32: epsilon, base, factor."""
    return Meta(Kind.FLOAT32, value)


def string(value: str) -> Meta:
    """A string."""
    return Meta(Kind.STRING, value)


def boolean(value: bool) -> Meta:
    """A bool."""
    return Meta(Kind.BOOL, value)


def strings(value: Sequence[str]) -> Meta:
    """An array of strings: tokens, merges."""
    return Meta(Kind.ARRAY, value, Kind.STRING)


def i32s(value: Sequence[int]) -> Meta:
    """An array of int32: token types."""
    return Meta(Kind.ARRAY, value, Kind.INT32)


def f32s(value: Sequence[float]) -> Meta:
    """An array of float32: token scores."""
    return Meta(Kind.ARRAY, value, Kind.FLOAT32)


def flags(value: Sequence[bool]) -> Meta:
    """An array of bools, one per layer."""
    return Meta(Kind.ARRAY, value, Kind.BOOL)
