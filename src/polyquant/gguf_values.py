"""GGUF metadata values with the types that llama.cpp's converter gives them."""

from __future__ import annotations

from collections.abc import Sequence

from polyquant.types import Kind, Meta

__all__ = ["boolean", "f32", "f32s", "flags", "i32s", "string", "strings", "u32"]


def u32(value: int) -> Meta:
    """A count, a size, a token id."""
    return Meta(Kind.UINT32, value)


def f32(value: float) -> Meta:
    """An epsilon, a base, a factor."""
    return Meta(Kind.FLOAT32, value)


def string(value: str) -> Meta:
    """Text."""
    return Meta(Kind.STRING, value)


def boolean(value: bool) -> Meta:
    """A switch."""
    return Meta(Kind.BOOL, value)


def strings(value: Sequence[str]) -> Meta:
    """Tokens, merges."""
    return Meta(Kind.ARRAY, value, Kind.STRING)


def i32s(value: Sequence[int]) -> Meta:
    """Token types."""
    return Meta(Kind.ARRAY, value, Kind.INT32)


def f32s(value: Sequence[float]) -> Meta:
    """Token scores."""
    return Meta(Kind.ARRAY, value, Kind.FLOAT32)


def flags(value: Sequence[bool]) -> Meta:
    """A switch for each layer."""
    return Meta(Kind.ARRAY, value, Kind.BOOL)
