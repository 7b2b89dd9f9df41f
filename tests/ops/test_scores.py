"""Layer norms, and changes to attention scores: caps, slopes, sinks.

Both engines against the formulas in float64.
"""

from __future__ import annotations

import numpy as np
import pytest

from polyquant.ops.decoder import BLOCK, Scores, add, attend, attend_int8, layer_norm


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 2, 64), (2, 4097)])
@pytest.mark.parametrize("biased", [True, False])
def test_layer_norm(shape, biased, engine):
    x, weight, bias = noise(*shape) + 3, noise(shape[-1], seed=1), noise(shape[-1], seed=2) if biased else None
    wide = x.astype(np.float64)
    centred = wide - wide.mean(-1, keepdims=True)
    expected = centred / np.sqrt(np.square(centred).mean(-1, keepdims=True) + 1e-5) * weight
    expected += 0 if bias is None else bias
    np.testing.assert_allclose(layer_norm(x, weight, bias, 1e-5), expected, rtol=3e-6, atol=3e-6)
    if x.ndim == 3:
        cut = np.concatenate([x.reshape(len(x), -1)] * 2, axis=1)[:, : x[0].size].reshape(shape)
        np.testing.assert_array_equal(layer_norm(cut, weight, bias, 1e-5), layer_norm(x, weight, bias, 1e-5))


def test_a_layer_norm_for_each_head(engine):
    y, weight = noise(5, 96), noise(3, 16, seed=1)
    heads = y[:, 8:56].reshape(5, 3, 16)
    each = [layer_norm(np.ascontiguousarray(heads[:, h]), weight[h], None, 1e-5) for h in range(3)]
    np.testing.assert_array_equal(layer_norm(heads, weight, None, 1e-5), np.stack(each, 1))


def test_scaled_sums(engine):
    x, y = noise(3, 40), noise(3, 40, seed=1)
    np.testing.assert_array_equal(add(x, y), x + y)
    np.testing.assert_allclose(add(x, y, 0.3), x + np.float32(0.3) * y, rtol=1e-6)


def formula(q, k, v, how: Scores, window: int = 0):
    """Each query alone: k, v [S, G, D]."""
    shared, out = q.shape[1] // k.shape[1], np.empty(q.shape)
    for t, h in np.ndindex(q.shape[:2]):
        seen = np.arange(max(0, t - window + 1) if window else 0, t + 1)
        scores = k[seen, h // shared].astype(np.float64) @ q[t, h] * q.shape[2] ** -0.5
        if how.softcap:
            scores = how.softcap * np.tanh(scores / how.softcap)
        if how.slopes is not None:
            scores += how.slopes[h] * (seen - t)
        weights = np.exp(scores)
        total = weights.sum() + (0 if how.sinks is None else np.exp(float(how.sinks[h])))
        out[t, h] = weights / total @ v[seen, h // shared].astype(np.float64)
    return out


HEADS = 6
HOW = {
    "capped": Scores(softcap=2.0),
    "slopes": Scores(slopes=np.float32(2.0) ** -np.arange(1, HEADS + 1, dtype=np.float32)),
    "sinks": Scores(sinks=noise(HEADS, seed=5) * 3),
    "all": Scores(30.0, np.full(HEADS, 0.1, np.float32), noise(HEADS, seed=5)),
}


@pytest.mark.parametrize("step", [1, 37, 700])
@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("name", HOW)
def test_scores(name, window, step, engine):
    tokens, groups, size, how = 600 if step > 1 else 90, 2, 20, HOW[name]
    q, k, v = noise(tokens, HEADS, size) * 2, noise(tokens, groups, size, seed=1), noise(tokens, groups, size, seed=2)
    blocks = -(-tokens // BLOCK)
    keys, values = (
        np.full(s, np.nan, np.float32) for s in ((groups, blocks, size, BLOCK), (groups, blocks, BLOCK, size))
    )
    out = [
        attend(
            *(x[a : a + step] for x in (q, k, v)), keys, values, start=a, scale=size**-0.5, window=window, scores=how
        )
        for a in range(0, tokens, step)
    ]
    np.testing.assert_allclose(np.concatenate(out), formula(q, k, v, how, window), atol=1e-5)


@pytest.mark.parametrize("name", HOW)
def test_scores_of_one_token_at_a_late_position(name, engine):
    """Blocks that several threads share."""
    tokens, groups, size, how = 1500, 2, 16, HOW[name]
    q, k, v = noise(tokens, HEADS, size), noise(tokens, groups, size, seed=1), noise(tokens, groups, size, seed=2)
    blocks = -(-tokens // BLOCK)
    keys, values = (np.zeros(s, np.float32) for s in ((groups, blocks, size, BLOCK), (groups, blocks, BLOCK, size)))
    attend(q[:-1], k[:-1], v[:-1], keys, values, start=0, scale=0.25)
    out = attend(q[-1:], k[-1:], v[-1:], keys, values, start=tokens - 1, scale=0.25, scores=how)
    whole = np.zeros((1, HEADS, size))
    for h in range(HEADS):
        scores = k[:, h // 3].astype(np.float64) @ q[-1, h] * 0.25
        scores = how.softcap * np.tanh(scores / how.softcap) if how.softcap else scores
        scores += 0 if how.slopes is None else how.slopes[h] * (np.arange(tokens) - tokens + 1)
        weights = np.exp(scores)
        total = weights.sum() + (0 if how.sinks is None else np.exp(float(how.sinks[h])))
        whole[0, h] = weights / total @ v[:, h // 3].astype(np.float64)
    np.testing.assert_allclose(out, whole, atol=1e-5)


@pytest.mark.parametrize("name", HOW)
def test_scores_of_an_int8_cache(name, engine):
    tokens, groups, size, how = 100, 2, 16, HOW[name]
    q, k, v = noise(tokens, HEADS, size), noise(tokens, groups, size, seed=1), noise(tokens, groups, size, seed=2)
    blocks = -(-tokens // BLOCK)
    kept = np.zeros((groups, blocks, size, BLOCK), np.int8), np.zeros((groups, blocks, BLOCK, size), np.int8)
    steps, recent = np.zeros((groups, blocks, 4, size), np.float32), np.zeros((groups, 2, BLOCK * size), np.float32)
    out = attend_int8(q, k, v, *kept, steps, recent, start=0, scale=0.25, scores=how)
    np.testing.assert_allclose(out[:BLOCK], formula(q, k, v, how)[:BLOCK], atol=1e-5)
    np.testing.assert_allclose(out, formula(q, k, v, how), atol=0.05)
