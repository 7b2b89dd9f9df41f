"""Rows from a file to codes in one pass give what the steps one by one give."""

import numpy as np
import pytest

import polyquant
from polyquant.ops import affine, native
from polyquant.ops.metrics import error_sums
from polyquant.types import Floats


@pytest.mark.parametrize("source", ["f32", "f16", "bf16"])
@pytest.mark.parametrize(("bits", "symmetric", "groups"), [(8, True, 1), (8, False, 4), (4, True, 8), (4, False, 1)])
def test_one_pass_equals_all_steps(source, bits, symmetric, groups):
    if native.lib() is None:
        assert affine.quantize_stored(source, np.zeros(4, np.uint8), (1, 1), 1, 8, symmetric=True, measure=True) is None
        pytest.skip("native kernels are not built or switched off")
    w = np.random.default_rng(0).standard_t(4, (23, 1280)).astype(np.float32)
    w[3] = 0
    codec = polyquant.codec(source)
    data = codec.pack(Floats(w))["blocks"]
    w = codec.dequantize({"blocks": data}, w.shape)
    codes, scale, offset, error = affine.quantize_stored(
        source, data, w.shape, groups, bits, symmetric=symmetric, measure=True
    )
    want = affine.min_max_grid(w, groups, bits, symmetric=symmetric)
    np.testing.assert_array_equal(scale, want[0])
    np.testing.assert_array_equal(offset, want[1])
    np.testing.assert_array_equal(codes, affine.encode(w, *want, bits, symmetric=symmetric))
    seen = error_sums(w, affine.decode(codes, scale, offset, np.empty_like(w)))
    assert error.count == seen.count and error.worst == seen.worst
    np.testing.assert_allclose(
        [error.aa, error.bb, error.ab, error.dd], [seen.aa, seen.bb, seen.ab, seen.dd], rtol=1e-6
    )


def test_non_finite_rows_return_none():
    w = np.ones((3, 32), np.float32)
    w[1, 5] = np.nan
    assert affine.quantize_stored("f32", w.view(np.uint8), w.shape, 1, 8, symmetric=True, measure=True) is None


def test_sums_of_rows(engine):
    codes = np.random.default_rng(1).integers(-128, 128, (5, 70_001)).astype(np.int8)
    codes[0] = -128
    np.testing.assert_array_equal(affine.row_sums(codes), codes.sum(1, dtype=np.int64))


@pytest.mark.parametrize("size", [1, 511, 512, 513, 5000])
@pytest.mark.parametrize("factor", [1.0, 1e-22, 1e22, 0.0])
def test_sums_of_errors_in_float_and_double(size, factor):
    """Stretches whose squares float32 cannot hold are summed in double."""
    rng = np.random.default_rng(size)
    a = (rng.standard_normal(size) * factor).astype(np.float32)
    b = (a * (1 + 1e-3 * rng.standard_normal(size))).astype(np.float32)
    with native.engine("numpy"):
        want = error_sums(a, b)
    got = error_sums(a, b)
    np.testing.assert_allclose([got.aa, got.bb, got.ab, got.dd], [want.aa, want.bb, want.ab, want.dd], rtol=2e-6)
    assert got.worst == want.worst
