"""What every codec promises, checked in one place. Each codec's test file calls these on its golden vectors."""

from __future__ import annotations

import warnings

import numpy as np

import polyquant
from polyquant.ops import native


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


def weighted_error(name: str, parts: dict[str, np.ndarray], source: np.ndarray, importance: np.ndarray) -> float:
    """Sum of importance * squared error."""
    miss = polyquant.codec(name).dequantize(parts, source.shape).astype(np.float64) - source
    return float((importance * miss**2).sum())


def awkward_floats(seed: int, shape: tuple[int, int]) -> np.ndarray:
    """Finite floats of every size: gaussian rows, random bit patterns, subnormals, signed zeros, ties, constant rows."""
    rng = np.random.default_rng(seed)
    w = rng.standard_normal(shape).astype(np.float32) * np.float32(10.0) ** rng.integers(-44, 38, (shape[0], 1))
    bits = rng.integers(0, 2**32, shape, np.uint32).view(np.float32)
    ties = rng.integers(-17, 18, shape).astype(np.float32) / 2
    zeros = rng.choice(np.array([0.0, -0.0, 1.0], np.float32), shape)
    constant = np.broadcast_to(rng.standard_normal((shape[0], 1)).astype(np.float32), shape)
    kinds = [w.astype(np.float32), bits, ties, zeros, -np.abs(ties), constant, w.astype(np.float32)]
    out = np.choose(rng.integers(0, len(kinds), (shape[0], 1)), kinds).astype(np.float32)
    return np.where(np.isfinite(out), out, np.float32(0))


def check_same_engines(name: str, searched: bool = False, shape: tuple[int, int] = (48, 768)) -> None:
    """Native and numpy give the same bytes from finite floats, and neither fails on infinity and NaN."""
    codec = polyquant.codec(name)
    warnings.simplefilter("error")  # pytest restores the filters after each test
    for seed in range(4):
        w = awkward_floats(seed, shape)
        importance = np.random.default_rng(seed).random(shape[1], np.float32) + np.float32(0.01) if searched else None
        packed = []
        for which in ("native", "numpy"):
            with native.engine(which):
                packed.append(codec.pack(codec.quantize(w, importance=importance))["blocks"])
        np.testing.assert_array_equal(packed[0], packed[1])
        w[seed::5, ::7], w[2::9, seed::11] = np.nan, -np.inf
        for which in ("native", "numpy"):
            with native.engine(which):
                assert codec.pack(codec.quantize(w, importance=importance))["blocks"].shape == packed[0].shape
