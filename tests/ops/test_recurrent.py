"""Scans a chunk at a time against the same token by token, and convolutions in pieces against whole ones."""

from __future__ import annotations

import numpy as np
import pytest

from polyquant.ops.recurrent import (
    convolve,
    delta_rule,
    delta_rule_steps,
    sigmoid,
    silu,
    softplus,
    state_space,
    state_space_steps,
    unit,
)

LENGTHS = [1, 2, 15, 16, 17, 50]


def normal(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def close(found, wanted):
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == np.float32 and a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=0, atol=3e-5 * max(1.0, np.abs(b).max()))


def of_state_space(seed, tokens, heads=6, groups=2, size=5, states=7, fast=1.0):
    rng = np.random.default_rng(seed)
    dt = softplus(normal(rng, tokens, heads))
    a = -np.exp(normal(rng, heads)) * np.float32(fast)
    return (
        normal(rng, heads, size, states),
        normal(rng, tokens, heads, size),
        dt,
        a,
        normal(rng, tokens, groups, states),
        normal(rng, tokens, groups, states),
    )


def of_delta_rule(seed, tokens, heads=6, keys=7, values=5, fast=1.0, alike=0.0):
    rng = np.random.default_rng(seed)
    k = normal(rng, tokens, heads, keys) + np.float32(alike) * normal(rng, 1, heads, keys)
    g = -np.exp(normal(rng, tokens, heads)) * np.float32(fast)
    return (
        normal(rng, heads, keys, values),
        unit(normal(rng, tokens, heads, keys)),
        unit(k),
        normal(rng, tokens, heads, values),
        g,
        sigmoid(normal(rng, tokens, heads) * 2),
    )


@pytest.mark.parametrize("fast", [0.001, 1.0, 50.0])
@pytest.mark.parametrize("tokens", LENGTHS)
def test_state_space(tokens, fast):
    given = of_state_space(tokens, tokens, fast=fast)
    close(state_space(*given, chunk=16), state_space_steps(*given))
    close(state_space(*given), state_space_steps(*given))


def test_a_state_space_of_one_channel_by_hand():
    state, dt = np.full((1, 1, 1), 4, np.float32), np.array([[np.log(2)], [np.log(4)]], np.float32)
    x, ones = np.array([[[3]], [[5]]], np.float32), np.ones((2, 1, 1), np.float32)
    for scan in (state_space, state_space_steps):
        y, end = scan(state, x, dt, np.array([-1], np.float32), ones, 2 * ones)
        first = 4 / 2 + np.log(2) * 3
        second = first / 4 + np.log(4) * 5
        np.testing.assert_allclose(y[:, 0, 0], [2 * first, 2 * second], rtol=1e-6)
        np.testing.assert_allclose(end[0, 0, 0], second, rtol=1e-6)


@pytest.mark.parametrize(("fast", "alike"), [(0.001, 0.0), (1.0, 0.0), (50.0, 0.0), (0.001, 5.0)])
@pytest.mark.parametrize("tokens", LENGTHS)
def test_delta_rule(tokens, fast, alike):
    given = of_delta_rule(tokens, tokens, fast=fast, alike=alike)
    close(delta_rule(*given, chunk=16), delta_rule_steps(*given))
    close(delta_rule(*given), delta_rule_steps(*given))


def test_a_delta_rule_that_overwrites():
    """With a rate of 1 and no decay, a key reads the value that was written last."""
    k = np.array([[[1, 0]], [[0, 1]], [[1, 0]]], np.float32)
    v = np.array([[[5]], [[7]], [[9]]], np.float32)
    zeros, ones = np.zeros((3, 1), np.float32), np.ones((3, 1), np.float32)
    for rule in (delta_rule, delta_rule_steps):
        y, end = rule(np.zeros((1, 2, 1), np.float32), k, k, v, zeros, ones)
        assert y.ravel().tolist() == [5, 7, 9] and end.ravel().tolist() == [9, 7]


@pytest.mark.parametrize("bias", [False, True])
def test_convolve(bias):
    rng = np.random.default_rng(3)
    x, kernel, added = normal(rng, 20, 6), normal(rng, 6, 4), normal(rng, 6) if bias else None
    window = normal(rng, 3, 6)
    whole, end = convolve(window, x, kernel, added)
    padded = np.concatenate([window, x])
    wanted = np.stack([np.convolve(padded[:, c], kernel[c, ::-1], "valid") for c in range(6)], 1)
    np.testing.assert_allclose(whole, wanted if added is None else wanted + added, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(end, x[-3:])
    pieces = []
    for a, b in ((0, 1), (1, 3), (3, 4), (4, 20)):
        y, window = convolve(window, x[a:b], kernel, added)
        pieces.append(y)
    np.testing.assert_array_equal(np.concatenate(pieces), whole)
    np.testing.assert_array_equal(window, end)


def test_elementwise_functions():
    x = np.array([-200, -1, 0, 1, 200], np.float32)
    np.testing.assert_allclose(sigmoid(x), [0, 1 / (1 + np.e), 0.5, 1 / (1 + 1 / np.e), 1], rtol=1e-6, atol=1e-30)
    np.testing.assert_allclose(
        softplus(x), [0, np.log1p(1 / np.e), np.log(2), np.log1p(np.e), 200], rtol=1e-6, atol=1e-30
    )
    np.testing.assert_allclose(silu(x), x * sigmoid(x))
    np.testing.assert_allclose(unit(np.array([[3, 4]], np.float32)), [[0.6, 0.8]], rtol=1e-6)
    assert not unit(np.zeros((1, 3), np.float32)).any()
