"""What every codec promises, checked in one place. Each codec's test file calls these on its golden vectors."""

from __future__ import annotations

import numpy as np

import polyquant


def same_floats(actual: np.ndarray, expected: np.ndarray) -> None:
    """Bit for bit; NaN compared by position only; the sign of zero counts."""
    actual, expected = np.asarray(actual, np.float32).ravel(), np.asarray(expected, np.float32).ravel()
    assert actual.shape == expected.shape
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(actual), nan)
    np.testing.assert_array_equal(actual.view(np.uint32)[~nan], expected.view(np.uint32)[~nan])


def check_dequantize(name: str, packed: np.ndarray, expected: np.ndarray) -> None:
    """Golden bytes to golden floats; by row slices too; into a given array too."""
    codec = polyquant.codec(name)
    parts = {"blocks": packed}
    shape = expected.shape
    same_floats(codec.dequantize(parts, shape), expected)
    same_floats(codec.dequantize(parts, shape, rows=slice(1, 3)), expected[1:3])
    out = np.empty(shape, np.float32)
    assert codec.dequantize(parts, shape, out=out) is out
    same_floats(out, expected)


def check_quantize_bytes(
    name: str, source: np.ndarray, packed: np.ndarray, importance: np.ndarray | None = None
) -> None:
    """Golden floats to golden bytes."""
    codec = polyquant.codec(name)
    parts = codec.pack(codec.quantize(source, importance=importance))
    np.testing.assert_array_equal(parts["blocks"], packed)


def check_sizes(name: str, shape: tuple[int, ...] = (6, 512)) -> None:
    """specs() says exactly what pack() gives, and unpack() takes it back."""
    codec = polyquant.codec(name)
    w = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    parts = codec.pack(codec.quantize(w))
    specs = codec.specs(shape)
    assert {k: (v.shape, v.dtype) for k, v in parts.items()} == {k: (s.shape, s.dtype) for k, s in specs.items()}
    again = codec.pack(codec.unpack(parts, shape))
    assert all(np.array_equal(again[k], parts[k]) for k in parts)
