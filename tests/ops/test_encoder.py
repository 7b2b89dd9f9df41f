"""Attention both ways against the formula, position by position."""

from __future__ import annotations

import numpy as np
import pytest

from polyquant.ops import encoder
from polyquant.ops.encoder import attend_bidirectional


def plainly(q, k, v, scale, window):
    out = np.empty(q.shape)
    tokens, heads, _ = q.shape
    for t in range(tokens):
        seen = [s for s in range(tokens) if not window or abs(s - t) <= window // 2]
        for h in range(heads):
            g = h * k.shape[1] // heads
            scores = np.array([q[t, h] @ k[s, g] for s in seen], np.float64) * scale
            weights = np.exp(scores - scores.max())
            out[t, h] = weights @ v[seen, g] / weights.sum()
    return out


@pytest.mark.parametrize("most", [1 << 24, 7], ids=["at once", "query by query"])
@pytest.mark.parametrize("window", [0, 1, 4, 5, 100])
@pytest.mark.parametrize(("tokens", "heads", "groups"), [(1, 4, 4), (13, 4, 2), (9, 3, 1)])
def test_bidirectional_attention(tokens, heads, groups, window, most, monkeypatch):
    rng = np.random.default_rng(1)
    monkeypatch.setattr(encoder, "_SCORES", most)
    q = rng.standard_normal((tokens, heads, 8), np.float32)
    k, v = (rng.standard_normal((tokens, groups, 8), np.float32) for _ in range(2))
    found = attend_bidirectional(q, k, v, scale=0.4, window=window)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, plainly(q, k, v, 0.4, window), rtol=0, atol=2e-6)
