"""Activations of feed-forward parts: both engines against the formulas in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest

from polyquant.ops.activations import activate, gated, xielu


def erfc(x):
    return np.vectorize(math.erfc)(x)


FORMULAS = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "relu": lambda x: np.maximum(x, 0),
    "relu2": lambda x: np.maximum(x, 0) ** 2,
    "gelu": lambda x: x * erfc(-x / math.sqrt(2)) / 2,
    "gelu_tanh": lambda x: x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
}


def numbers(n: int) -> np.ndarray:
    """Large, small and special ones, as a row."""
    rng = np.random.default_rng(n)
    special = np.float32([0, -0.0, 1e-30, -1e-30, 1e-6, -1e-6, 0.5, -0.5, 8, -8, 30, -30, 1e4, -1e4])
    return np.concatenate([rng.standard_normal(n, np.float32) * 3, special])[None]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("kind", FORMULAS)
@pytest.mark.parametrize("n", [1, 17, 40003])
def test_activations(kind, n, engine):
    x = numbers(n)
    up = np.random.default_rng(1).standard_normal(x.shape, np.float32)
    expected = FORMULAS[kind](x.astype(np.float64))
    np.testing.assert_allclose(activate(kind, x), expected, rtol=2e-6, atol=5e-7)
    np.testing.assert_allclose(gated(kind, x, up), expected * up, rtol=2e-6, atol=2e-6)
    assert np.isnan(activate(kind, np.full((1, 3), np.nan, np.float32))).all()


@pytest.mark.parametrize("kind", FORMULAS)
def test_strided_rows(kind, engine):
    y = np.random.default_rng(0).standard_normal((5, 96), np.float32)
    a, b = y[:, 8:45], y[:, 45:82]
    np.testing.assert_array_equal(activate(kind, a), activate(kind, a.copy()))
    np.testing.assert_array_equal(gated(kind, a, b), gated(kind, a.copy(), b.copy()))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("positive", "negative", "eps"), [(0.8, 1.3, -1e-6), (0.1, 2.0, -0.25)])
def test_xielu(positive, negative, eps, engine):
    x = numbers(5003)
    wide, beta = x.astype(np.float64), 0.5
    grown = negative * (np.expm1(np.minimum(wide, eps)) - wide) + beta * wide
    expected = np.where(wide > 0, positive * wide**2 + beta * wide, grown)
    np.testing.assert_allclose(xielu(x, positive, negative, beta, eps), expected, rtol=2e-6, atol=5e-7)
    wider = np.concatenate([x, x, x])[:, 3:900]
    np.testing.assert_array_equal(
        xielu(wider, positive, negative, beta, eps), xielu(wider.copy(), positive, negative, beta, eps)
    )
