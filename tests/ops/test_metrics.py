"""Error sums: the same bits native and in numpy, because a Trellis folder states them."""

import numpy as np
import pytest

from polyquant.ops import native
from polyquant.ops.metrics import error_sums, stored_errors
from polyquant.registry import codec


def pairs(n):
    rng = np.random.default_rng(n)
    x = rng.standard_normal(n, np.float32)
    y = x + rng.standard_normal(n, np.float32) * np.float32(0.01)
    hole, broken = x.copy(), x.copy()
    hole[n // 2 : n // 2 + 1], broken[n // 3 : n // 3 + 1] = 0, np.inf
    tiny, large = np.float32(1e-15), np.float32(1e18)
    zeros = np.zeros_like(x)
    return {
        "close": (x, y), "equal": (x, x), "tiny": (x * tiny, y * tiny), "large": (x * large, y * large),
        "zeros": (hole, zeros), "from zeros": (zeros, hole), "infinite": (broken, y),
    }  # fmt: skip


@pytest.mark.skipif(not native.available(), reason="native kernels are not built")
@pytest.mark.parametrize("n", [0, 1, 511, 512, 5000, (1 << 18) + 700])
def test_numpy_adds_in_the_order_of_the_native_kernel(n):
    for name, (x, y) in pairs(n).items():
        with native.engine("native"):
            wanted = error_sums(x, y)
        with native.engine("numpy"):
            found = error_sums(x, y)
        assert repr(found) == repr(wanted), name


def test_the_sums_are_right(engine):
    x, y = (v.astype(np.float64) for v in pairs(5000)["close"])
    found = error_sums(x.astype(np.float32), y.astype(np.float32))
    wanted = [x @ x, y @ y, x @ y, (x - y) @ (x - y)]
    np.testing.assert_allclose([found.aa, found.bb, found.ab, found.dd], wanted, rtol=1e-6)
    assert found.worst == np.abs(x - y).max() and found.count == 5000


@pytest.mark.skipif(not native.available(), reason="native kernels are not built")
@pytest.mark.parametrize(("one", "other"), [("bf16", "q8_0"), ("f32", "q4_k"), ("q6_k", "iq4_xs"), ("f16", "f16")])
@pytest.mark.parametrize("rows", [0, 1, 9])
def test_the_sums_of_stored_blocks_are_those_of_their_floats(one, other, rows):
    a, b = codec(one), codec(other)
    x = np.random.default_rng(6).standard_normal((rows, 768)).astype(np.float32)  # 9 rows end inside a stretch
    x[3:4] *= np.float32(1e-15)
    p, q = a.pack(a.quantize(x)), b.pack(b.quantize(x))
    wanted = error_sums(a.dequantize(p, x.shape), b.dequantize(q, x.shape))
    stored = [parts["blocks"].view(np.uint8) for parts in (p, q)]
    assert repr(stored_errors(one, stored[0], other, stored[1], x.size)) == repr(wanted)


def test_codecs_without_kernels_have_no_sums_of_stored_blocks():
    nothing = np.empty((0, 0), np.uint8)
    assert stored_errors("trellis.3", nothing, "bf16", nothing, 0) is None
