"""Norm, rotary positions, gates and attention: both engines against the formulas in float64."""

import math
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyquant.ops import native
from polyquant.ops.activations import gated
from polyquant.ops.decoder import (
    BLOCK,
    Scores,
    add,
    add_bias,
    attend,
    attend_int8,
    concatenated,
    rms_norm,
    rotate,
    swiglu,
)
from polyquant.runtime.kv_cache import KVCache
from polyquant.runtime.state import StateSpec


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


@pytest.mark.parametrize("shape", [(1, 1), (1, 2048), (3, 7), (5, 100), (4, 6, 33), (2, 0, 8), (40, 2049)])
def test_rms_norm(engine, shape):
    x, weight = noise(*shape), noise(shape[-1], seed=1)
    wide = x.astype(np.float64)
    expected = wide / np.sqrt(np.square(wide).mean(-1, keepdims=True) + 1e-5) * weight
    np.testing.assert_allclose(rms_norm(x, weight, 1e-5), expected, rtol=1e-6)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("tokens", "heads", "size", "turned"), [(1, 4, 64, 32), (5, 3, 10, 3), (2, 1, 7, 0), (70, 8, 32, 16)]
)
def test_rotate(engine, tokens, heads, size, turned, interleaved):
    x, angle = noise(tokens, heads, size), noise(tokens, turned, seed=1)
    expected = x.astype(np.float64)
    for i in range(turned):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + turned)
        turn = np.exp(1j * angle[:, None, i].astype(np.float64)) * (x[..., a] + 1j * x[..., b])
        expected[..., a], expected[..., b] = turn.real, turn.imag
    np.testing.assert_allclose(rotate(x, np.cos(angle), np.sin(angle), interleaved=interleaved), expected, atol=1e-6)


@pytest.mark.parametrize("shape", [(1, 1), (1, 2048), (3, 7), (0, 5), (4, 6, 33), (40, 2049)])
def test_add(engine, shape):
    x, y = noise(*shape), noise(*shape, seed=1)
    found = add(x, y)
    np.testing.assert_array_equal(found, x + y)
    assert found is not x
    assert found.dtype == np.float32


@pytest.mark.parametrize(("tokens", "n"), [(1, 1), (1, 300), (7, 33), (0, 4), (40, 2049)])
def test_add_bias(engine, tokens, n):
    wide, bias = noise(tokens, n + 5), noise(n, seed=1)
    expected = wide.copy()
    expected[:, 2 : n + 2] += bias
    add_bias(wide[:, 2 : n + 2], bias)
    np.testing.assert_array_equal(wide, expected)


@pytest.mark.parametrize(("rows", "a", "b"), [(1, 1, 3), (7, 16, 33), (0, 4, 2), (40, 512, 64)])
def test_joined(engine, rows, a, b):
    wide = noise(rows, a + b + 5)
    left, right = wide[:, 2 : a + 2], wide[:, a + 5 :]
    found = concatenated(right, left)
    np.testing.assert_array_equal(found, np.concatenate([right, left], 1))
    assert found.flags.c_contiguous and not np.shares_memory(found, wide)
    np.testing.assert_array_equal(concatenated(left), left)


GATES = [-math.inf, -200, -100, -88, -20, -1, -1e-30, 0, 1e-30, 0.5, 1, 20, 88, 89, 200, math.inf, math.nan]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_swiglu(engine):
    gate = np.concatenate([noise(100003) * 10, np.float32(GATES)])[None]
    up = noise(*gate.shape, seed=1)
    wide = gate.astype(np.float64)
    expected = wide / (1 + np.exp(-wide)) * up
    np.testing.assert_allclose(swiglu(gate, up), expected, rtol=5e-7, atol=1e-34)


def test_gated_by_relu2(engine):
    gate = np.concatenate([noise(40003), np.float32(GATES[1:-2])])[None]
    up = noise(*gate.shape, seed=1)
    np.testing.assert_allclose(
        gated("relu2", gate, up), np.maximum(gate, 0).astype(np.float64) ** 2 * up, rtol=1e-6, atol=1e-38
    )
    assert np.isnan(gated("relu2", np.float32([[math.nan]]), np.float32([[1]])))


def test_strided_rows(engine):
    y, angle = noise(5, 96), noise(5, 4)
    a, b = y[:, 8:40], y[:, 40:72]
    heads = a.reshape(5, 2, 16)
    assert np.shares_memory(heads, y)
    assert not heads.flags.c_contiguous
    for fn in (
        lambda x: rotate(x, np.cos(angle), np.sin(angle), interleaved=True),
        lambda x: rms_norm(x, noise(16), 1e-6),
    ):
        np.testing.assert_array_equal(fn(heads), fn(heads.copy()))
    for gate_of in (swiglu, partial(gated, "relu2")):
        np.testing.assert_array_equal(gate_of(a, b), gate_of(a.copy(), b.copy()))


# ---------------------------------------------------------------- attention


def formula(q, k, v, *, start=0, window=0, chunk=0):
    """Each query alone, in float64: k, v [S, G, D] of all positions."""
    shared, out = q.shape[1] // k.shape[1], np.empty(q.shape)
    for t, h in np.ndindex(q.shape[:2]):
        p = start + t
        seen = slice(max(p - window + 1 if window else 0, p - p % chunk if chunk else 0, 0), p + 1)
        scores = k[seen, h // shared].astype(np.float64) @ q[t, h] * q.shape[2] ** -0.5
        weights = np.exp(scores - scores.max())
        out[t, h] = weights / weights.sum() @ v[seen, h // shared].astype(np.float64)
    return out


def float_blocks(positions, groups, size, dtype):
    blocks = -(-positions // BLOCK)
    return np.full((groups, blocks, size, BLOCK), np.nan, dtype), np.full((groups, blocks, BLOCK, size), np.nan, dtype)


SHAPES = [  # tokens, heads, groups, size
    (1, 1, 1, 1),
    (1, 8, 2, 64),
    (33, 6, 2, 20),
    (100, 4, 4, 16),
    (40, 70, 1, 8),
    (150, 32, 4, 64),
]


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("window", [0, 1, 20, 64, 1000])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attend(engine, shape, window, dtype):
    tokens, heads, groups, size = shape
    q, k, v = noise(tokens, heads, size), noise(tokens, groups, size, seed=1), noise(tokens, groups, size, seed=2)
    keys, values = float_blocks(tokens, groups, size, dtype)
    out = attend(q, k, v, keys, values, start=0, scale=size**-0.5, window=window)
    expected = formula(q, k.astype(dtype), v.astype(dtype), window=window)
    np.testing.assert_allclose(out, expected, atol=3e-6)


@pytest.mark.parametrize("kind", ["f32", "int8"])
@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("chunk", [1, 7, 32, 64, 1000])
@pytest.mark.parametrize("step", [1, 31, 150])
def test_attend_in_chunks(engine, step, chunk, window, kind):
    tokens, heads, groups, size = 150, 6, 2, 16
    q, k, v = noise(tokens, heads, size), noise(tokens, groups, size, seed=1), noise(tokens, groups, size, seed=2)
    cache, out = KVCache([StateSpec((groups, size))], kind), []
    for a in range(0, tokens, step):
        now = slice(a, a + step)
        out.append(cache.attend(0, q[now], k[now], v[now], scale=0.25, window=window, scores=Scores(chunk=chunk)))
        cache.length += len(out[-1])
    plain = formula(q, k, v, window=window, chunk=chunk)
    np.testing.assert_allclose(np.concatenate(out), plain, atol=2e-6 if kind == "f32" else 0.05)


@pytest.mark.parametrize("step", [1, 2, 31, 32, 50])
@pytest.mark.parametrize("window", [0, 40])
def test_attend_in_steps(engine, step, window):
    tokens, heads, groups, size = 130, 6, 2, 16
    q, k, v = noise(tokens, heads, size), noise(tokens, groups, size, seed=1), noise(tokens, groups, size, seed=2)
    keys, values = float_blocks(tokens, groups, size, np.float32)
    out = [
        attend(q[a : a + step], k[a : a + step], v[a : a + step], keys, values, start=a, scale=0.25, window=window)
        for a in range(0, tokens, step)
    ]
    np.testing.assert_allclose(np.concatenate(out), formula(q, k, v, window=window), atol=2e-6)


@pytest.mark.parametrize("window", [0, 700, 1500])
def test_two_queries_over_a_long_context(engine, window):
    span, heads, groups, size = 3000, 8, 2, 32
    k, v = noise(span, groups, size), noise(span, groups, size, seed=1)
    q = noise(2, heads, size, seed=2)
    keys, values = float_blocks(span, groups, size, np.float16)
    for a in range(0, span - 2, 500):
        b = min(a + 500, span - 2)
        attend(np.zeros((b - a, heads, size), np.float32), k[a:b], v[a:b], keys, values, start=a, scale=1, window=1)
    out = attend(q, k[-2:], v[-2:], keys, values, start=span - 2, scale=size**-0.5, window=window)
    expected = formula(q, k.astype(np.float16), v.astype(np.float16), start=span - 2, window=window)
    np.testing.assert_allclose(out, expected, atol=2e-6)


def int8_blocks(positions, groups, size):
    blocks = -(-positions // BLOCK)
    return (
        np.full((groups, blocks, size, BLOCK), 77, np.int8),
        np.full((groups, blocks, BLOCK, size), 77, np.int8),
        np.full((groups, blocks, 4, size), np.nan, np.float32),
        np.full((groups, 2, BLOCK * size), np.nan, np.float32),
    )


def int8_channels(x):
    """x [32, G, D] rounded as the module's docstring defines it."""
    low, high = x.min(0), x.max(0)
    step = (high - low) / np.float32(255)
    codes = np.minimum(np.rint((x - low) / np.where(step > 0, step, 1)), 255) - 128
    return codes * step + (low + 128 * step)


def formula_int8(q, k, v, window=0):
    k, v, out = k.copy(), v.copy(), []
    for a in range(0, len(q), BLOCK):
        b = min(a + BLOCK, len(q))
        out.append(formula(q[a:b], k[:b], v[:b], start=a, window=window))
        if b - a == BLOCK:
            k[a:b], v[a:b] = int8_channels(k[a:b]), int8_channels(v[a:b])
    return np.concatenate(out)


@pytest.mark.parametrize("step", [1, 7, 32, 33, 200])
@pytest.mark.parametrize(("heads", "groups", "size", "window"), [(4, 2, 16, 0), (3, 3, 10, 0), (8, 1, 32, 50)])
def test_attend_int8(engine, heads, groups, size, window, step):
    tokens = 165
    q, k, v = noise(tokens, heads, size), noise(tokens, groups, size, seed=1) + 3, noise(tokens, groups, size, seed=2)
    k[:, :, 0] = 5  # a channel that never changes
    cache = int8_blocks(tokens, groups, size)
    out = [
        attend_int8(*(x[a : a + step] for x in (q, k, v)), *cache, start=a, scale=size**-0.5, window=window)
        for a in range(0, tokens, step)
    ]
    np.testing.assert_allclose(np.concatenate(out), formula_int8(q, k, v, window), atol=1e-5)


@given(st.integers(0, 2**32 - 1), st.sampled_from([1e-45, 1e-43, 1e-38, 1, 1e30, 3e38]))
@settings(deadline=None, max_examples=30)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_both_engines_keep_the_same_codes(seed, top):
    rng = np.random.default_rng(seed)
    x = (rng.uniform(-1, 1, (2, BLOCK, 2, 5)) * top).astype(np.float32)
    x[0, rng.integers(BLOCK), 0, 0] = np.nan
    x[1, rng.integers(BLOCK), 1, 4] = np.inf
    kept = []
    for which in ("native", "numpy"):
        cache = int8_blocks(BLOCK, 2, 5)
        with native.engine(which):
            attend_int8(np.zeros((BLOCK, 2, 5), np.float32), x[0], x[1], *cache, start=0, scale=1.0)
        kept.append(cache)
    for a, b in zip(*kept, strict=True):
        np.testing.assert_array_equal(a, b)
    assert np.isnan(kept[0][2][0, 0, :2, 0]).all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
def test_attention_accepts_any_float(engine, bad):
    q, k, v = (noise(70, 2, 9, seed=s) for s in range(3))
    q[3], k[10], v[69, 0] = bad, bad, bad
    q[69] = np.abs(q[69])  # so that 3e38 overflows upwards: attention omits scores of -inf
    for dtype in (np.float32, np.float16):
        out = attend(q, k, v, *float_blocks(70, 2, 9, dtype), start=0, scale=1.0)
        assert out.shape == q.shape
        assert not np.isfinite(out[69]).all()
    assert attend_int8(q, k, v, *int8_blocks(70, 2, 9), start=0, scale=1.0).shape == q.shape


@pytest.mark.skipif(native.lib() is None, reason="native kernels are not built or switched off")
def test_threads_change_no_bit():
    q, k, v = noise(700, 8, 32), noise(700, 2, 32, seed=1), noise(700, 2, 32, seed=2)
    before, found = native.threads(), []
    try:
        for threads in (1, 3):
            native.set_threads(threads)
            cache = int8_blocks(701, 2, 32)
            out = [attend_int8(q, k, v, *cache, start=0, scale=0.2)]
            out += [attend_int8(q[:1], k[:1], v[:1], *cache, start=700, scale=0.2), *cache]
            out += [swiglu(q.reshape(1, -1), q.reshape(1, -1)), rms_norm(q, noise(32), 1e-5)]
            found.append(out)
    finally:
        native.set_threads(before)
    for a, b in zip(*found, strict=True):
        np.testing.assert_array_equal(a, b)


# ---------------------------------------------------------------- the edge of the extension module


@pytest.mark.skipif(native.lib() is None, reason="native kernels are not built or switched off")
@pytest.mark.parametrize(
    "change",
    [
        {"q": noise(2, 3, 8)},  # heads that the groups do not divide
        {"q": noise(2, 4, 9)},
        {"k": noise(1, 2, 8)},
        {"v": noise(2, 2, 7)},
        {"start": 63},
        {"start": 2**63},
        {"q": noise(2, 4, 8).astype(np.float64)},
        {"q": noise(2, 4, 16)[:, :, ::2]},
        {"keys": np.zeros((2, 2, 8, 31), np.float32)},
        {"values": np.zeros((2, 1, 32, 8), np.float32)},
        {"values": np.zeros((2, 2, 32, 8), np.float16)},
        {"keys": np.zeros((2, 2, 8, 32), np.int8), "values": np.zeros((2, 2, 32, 8), np.int8)},  # without steps
    ],
    ids=lambda change: ",".join(change),
)
def test_native_attention_refuses_mismatched_shapes(change):
    good = {
        "q": noise(2, 4, 8), "k": noise(2, 2, 8), "v": noise(2, 2, 8),
        "keys": np.zeros((2, 2, 8, 32), np.float32), "values": np.zeros((2, 2, 32, 8), np.float32), "start": 62,
    }  # fmt: skip
    order = ("q", "k", "v", "keys", "values")
    attend(*(good[name] for name in order), start=good["start"], scale=1)
    bad = good | change
    with pytest.raises((ValueError, TypeError)):
        attend(*(bad[name] for name in order), start=bad["start"], scale=1)
