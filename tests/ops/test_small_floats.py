"""Small floats: values, rounding and errors against ml_dtypes; native kernels against their references."""

import ml_dtypes
import numpy as np
import pytest

from polyquant.ops import native
from polyquant.ops import small_floats as sf

DTYPES = {"e2m1": ml_dtypes.float4_e2m1fn, "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}


def both_engines(function):
    """The result of the native kernel, after a comparison with that of numpy, bit for bit."""
    with native.engine("numpy"):
        want = function()
    got = function()
    for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (got, want)), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))
    return got


def floats(kind, rows=3, k=77):
    """Magnitudes beyond both ends of the range, midpoints between neighbours, and zeros of both signs."""
    rng = np.random.default_rng(3)
    table = np.sort(np.unique(sf.values(kind)[: sf.ELEMENTS[kind].top + 1]))
    middle = (table[1:] + table[:-1]) / 2
    w = rng.standard_normal((rows, k)) * np.exp2(rng.integers(-18, 18, (rows, k)))
    w[0, : min(k, len(middle))] = middle[:k]
    w[1, : min(k, len(table))] = -table[:k]
    w[2, :2] = [0.0, -0.0]
    return w.astype(np.float32)


@pytest.mark.parametrize("kind", DTYPES)
def test_rounding_is_that_of_ml_dtypes_with_saturation(kind):
    w, largest = floats(kind, k=300), sf.ELEMENTS[kind].largest
    codes = both_engines(lambda: sf.encode(w, kind, np.ones((3, 1), np.float32), 300))
    want = np.clip(w, -largest, largest).astype(DTYPES[kind]).astype(np.float32)
    np.testing.assert_array_equal(sf.values(kind)[codes], want)
    np.testing.assert_array_equal(np.signbit(sf.values(kind)[codes]), np.signbit(w))


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("group", [16, 32, 77, 20])
def test_groups(kind, group):
    w = floats(kind)
    top = both_engines(lambda: sf.amax(w, group))
    groups = -(-77 // group)
    want = [np.abs(w[:, g * group : (g + 1) * group]).max(1) for g in range(groups)]
    np.testing.assert_array_equal(top, np.stack(want, 1))
    scale = np.stack([top / sf.ELEMENTS[kind].largest, top * 0, top / 3], 2).astype(np.float32)
    weights = np.random.default_rng(0).uniform(0, 2, 77).astype(np.float32)
    errors = both_engines(lambda: sf.errors(w, kind, scale, group, weights))
    for c in range(3):
        one = np.ascontiguousarray(scale[:, :, c])
        codes = both_engines(lambda one=one: sf.encode(w, kind, one, group))
        back = sf.values(kind)[codes] * np.repeat(one, group, 1)[:, :77]
        squared = (back.astype(np.float64) - w) ** 2 * weights
        sums = [squared[:, g * group : (g + 1) * group].sum(1) for g in range(groups)]
        np.testing.assert_allclose(errors[:, :, c], np.stack(sums, 1), rtol=1e-5)


@pytest.mark.parametrize(("block", "table"), [((1, 16), (5, 5)), ((1, 0), (5, 1)), ((4, 32), (2, 3)), ((0, 0), (1, 1))])
def test_decode(block, table):
    rng = np.random.default_rng(1)
    codes = rng.integers(0, 0x7F, (5, 70), dtype=np.uint8)
    scale = rng.standard_normal(table).astype(np.float32)
    got = both_engines(lambda: sf.decode(codes, "e4m3", scale, block, np.empty((5, 70), np.float32)))
    rows = np.arange(5) // block[0] if block[0] else np.zeros(5, int)
    columns = np.arange(70) // block[1] if block[1] else np.zeros(70, int)
    np.testing.assert_array_equal(got, sf.values("e4m3")[codes] * scale[rows][:, columns])
    if block[0] == 4:
        part = both_engines(lambda: sf.decode(codes[3:], "e4m3", scale, block, np.empty((2, 70), np.float32), 3))
        np.testing.assert_array_equal(part, got[3:])


@pytest.mark.parametrize(("size", "together"), [(32, 1), (16, 4)])
def test_order_of_blocks(size, together):
    rng = np.random.default_rng(2)
    codes = rng.integers(0, 16, (3, 128), dtype=np.uint8)
    scales = rng.integers(0, 256, (3, 128 // size), dtype=np.uint8)
    stream = sf.pairs(codes)
    np.testing.assert_array_equal(sf.nibbles(stream), codes)
    blocks = both_engines(lambda: sf.join_blocks(stream, scales, size, together))
    first = blocks[:, together : together + size // 2]
    np.testing.assert_array_equal(first & 15, codes[:, : size // 2])
    np.testing.assert_array_equal(first >> 4, codes[:, size // 2 : size])
    np.testing.assert_array_equal(blocks[:, :together], scales[:, :together])
    pairs, back = both_engines(lambda: sf.split_blocks(blocks, size, together))
    np.testing.assert_array_equal(pairs, stream)
    np.testing.assert_array_equal(back, scales)


def test_empty():
    empty = np.empty((0, 64), np.float32)
    assert both_engines(lambda: sf.encode(empty, "e2m1", np.empty((0, 2), np.float32), 32)).shape == (0, 64)
    assert both_engines(lambda: sf.amax(empty, 32)).shape == (0, 2)
    bytes_ = np.empty((0, 32), np.uint8)
    blocks = both_engines(lambda: sf.join_blocks(bytes_, np.empty((0, 2), np.uint8), 32, 1))
    assert [x.shape for x in both_engines(lambda: sf.split_blocks(blocks, 32, 1))] == [(0, 32), (0, 2)]
