"""Static layer quantization: the stored values are consistent, and their integer arithmetic computes the layer."""

import numpy as np
import pytest

from polyquant.codecs.msmodelslim import msmodelslim_named
from polyquant.errors import CodecError
from polyquant.quantizers.affine import FRACTION, cache_grid, input_grid, quantize_linear, sparse_grid


def layer(seed, n=48, k=160):
    """A weight with outliers, and a bias."""
    rng = np.random.default_rng(seed)
    w = rng.standard_t(4, (n, k)).astype(np.float32) * 0.05
    return w, rng.standard_normal(n).astype(np.float32)


STATIC = ["w8a8", "w8a8.i64", "w8a8.tensor.f16.i64.scales", "w8a8.bf16.scales", "w8a8s", "w8a8s.f16.i64", "w8a8.mix"]


@pytest.mark.parametrize("name", STATIC)
def test_tensors_of_a_layer_are_consistent(name):
    codec = msmodelslim_named(name)
    w, bias = layer(1)
    parts = codec.pack(quantize_linear(codec, w, input_range=(-3.3, 7.1), bias=bias))
    read = codec.unpack(parts, w.shape)
    side = read.activation
    if "weight_scale" in parts:
        expected = np.float32(
            parts["input_scale"].astype(np.float32) * parts["weight_scale"].astype(np.float32).reshape(-1)
        )
        np.testing.assert_array_equal(side.deq_scale, expected)
    sums = parts["weight"].sum(1, dtype=np.int64)
    expected = np.rint(bias.astype(np.float64) / side.deq_scale - side.offset.astype(np.float64) * sums)
    np.testing.assert_array_equal(parts["quant_bias"], expected)
    assert side.offset == np.rint(side.offset)
    assert -128 <= side.offset <= 127


@pytest.mark.parametrize("name", STATIC)
def test_integers_compute_the_layer_with_its_bias_once(name):
    """The error is that of rounding weights and inputs, 1/12 of the squared step each, regardless of outliers."""
    codec = msmodelslim_named(name)
    w, bias = layer(2)
    x = np.random.default_rng(20).uniform(-3.3, 7.1, (64, w.shape[1])).astype(np.float32)
    found = quantize_linear(codec, w, input_range=(x.min(), x.max()), bias=bias)
    read = codec.unpack(codec.pack(found), w.shape)
    side = read.activation
    q = np.clip(np.rint(x / side.scale + side.offset), -128, 127).astype(np.int64)
    y = (q @ read.codes.T.astype(np.int64) + side.quant_bias) * side.deq_scale
    of_weights = np.square(x).sum(1, keepdims=True) * np.square(read.scale).T  # [tokens, N]
    of_inputs = np.square(w).sum(1) * np.square(side.scale)  # [N]
    rounding = np.sqrt((of_weights + of_inputs).sum() / 12)
    assert np.linalg.norm(y - (x @ w.T + bias)) < 1.35 * rounding  # 0.89 to 1.21 of it for 300 seeds


@pytest.mark.parametrize(
    ("low", "high", "dtype", "scale", "offset"),
    [
        (-1.0, 1.55, np.float32, 0.01, -28),
        (2.0, 5.1, np.float32, 0.02, -128),
        (-5.1, -2.0, np.float32, 0.02, 127),
        (0.0, 0.0, np.float32, 1, -128),
        (0.0, 1e-12, np.float16, 2**-14, -128),
    ],
)
def test_grid_of_inputs(low, high, dtype, scale, offset):
    found = input_grid((low, high), np.dtype(dtype))
    np.testing.assert_allclose(found[0], [scale], rtol=1e-6)
    assert found[1] == [offset]


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_zero_is_on_the_grid_and_the_ends_inside(dtype):
    for low, high in np.random.default_rng(3).uniform(-40, 40, (200, 2)):
        low, high = min(low, high), max(low, high)
        scale, offset = input_grid((low, high), np.dtype(dtype))
        least, greatest = (-128 - offset) * scale, (127 - offset) * scale
        assert least <= 0 <= greatest
        assert least <= low + 0.6 * scale
        assert greatest >= high - 0.8 * scale  # half a step, plus the shift of the far end by rounding the scale


def test_ranges_that_a_dtype_cannot_hold():
    with pytest.raises(CodecError, match="not finite as stored"):
        input_grid((0, 1e9), np.dtype(np.float16))
    with pytest.raises(CodecError, match="not finite"):
        input_grid((0, np.inf), np.dtype(np.float32))


def test_sums_beyond_int32_are_refused_not_wrapped():
    w = np.full((2, 160), 1e-9, np.float32)
    with pytest.raises(CodecError, match=r"quant_bias does not fit int32.*row 1"):
        quantize_linear(msmodelslim_named("w8a8"), w, input_range=(-1, 1), bias=np.array([0, 100], np.float32))
    with pytest.raises(CodecError, match="bias contains NaN"):
        quantize_linear(msmodelslim_named("w8a8"), w, input_range=(-1, 1), bias=np.array([0, np.nan], np.float32))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["w8a16", "w8a8s", "w8a8.dynamic", "w4a16.g32"])
def test_nan_and_infinity_are_refused(name, bad):
    w, _ = layer(4)
    w[3, 7] = bad
    with pytest.raises(CodecError, match="NaN or infinity"):
        quantize_linear(msmodelslim_named(name), w, input_range=(-1, 1))


def test_static_types_need_a_range():
    with pytest.raises(CodecError, match=r"needs the input range.*--calibration"):
        quantize_linear(msmodelslim_named("w8a8"), layer(5)[0])


def test_sparse_codes_keep_inliers_in_four_bits_without_clipping():
    w, _ = layer(6, 96, 160)
    w[5, 9] = 40  # far beyond 127 steps of its row's inliers
    found = quantize_linear(msmodelslim_named("w8a8s"), w, input_range=(-1, 1))
    assert np.count_nonzero(np.abs(found.codes) > 7) <= FRACTION * w.size
    assert found.codes[5, 9] == 127
    error = np.abs(found.codes * found.scale - w)
    assert (error <= found.scale * 0.501).all()
    np.testing.assert_array_equal(sparse_grid(np.zeros((3, 32), np.float32)), np.ones((3, 1)))


def test_grid_of_the_cache_per_channel():
    low, high = np.array([-2.54, -1, 1, 0], np.float32), np.array([1, 1.55, 2.55, 0], np.float32)
    scale, offset = cache_grid(low, high, symmetric=True)
    np.testing.assert_allclose(scale, [0.02, 1.55 / 127, 2.55 / 127, 1], rtol=1e-6)
    assert not offset.any()
    scale, offset = cache_grid(low, high, symmetric=False)
    np.testing.assert_allclose(scale, [3.54 / 255, 0.01, 0.01, 1], rtol=1e-6)
    np.testing.assert_array_equal(offset[1:], [-28, -128, -128])
