"""GPTQ: an output error well below plain rounding for every scale layout; plain rounding for unusable Hessians."""

import numpy as np
import pytest

from polyquant.codecs.msmodelslim import msmodelslim_named
from polyquant.errors import CodecError
from polyquant.ops import affine
from polyquant.quantizers.affine import quantize_linear
from polyquant.quantizers.gptq import quantize_gptq, searched_grid


def case(seed, n=64, k=256, tokens=600):
    """A weight and the Hessian of correlated inputs, as in language models."""
    rng = np.random.default_rng(seed)
    mix = rng.standard_normal((k, k)) * np.linspace(2, 0.02, k) ** 2
    x = rng.standard_normal((tokens, k)) @ mix.T
    return rng.standard_t(5, (n, k)).astype(np.float32) * 0.02, (x.T @ x / tokens).astype(np.float32)


def off(codes, w, h):
    d = affine.decode(codes.codes, codes.scale, codes.offset, np.empty_like(w)) - w
    return float(np.einsum("nk,kl,nl->", d, h, d, optimize=True))


@pytest.mark.parametrize("name",
    ["w8a16.g128", "w8a16", "w8a16.asym", "w8a16.g32.asym", "w4a16.g32", "w4a16.g128.asym", "w8a16.f16", "w8a16.tensor",
        "w8a8.dynamic", "w8a8s"])  # fmt: skip
def test_output_error_is_at_least_a_fifth_lower(name):
    codec = msmodelslim_named(name)
    w, h = case(1)
    plain = quantize_linear(codec, w, input_range=(-1, 1))
    found = quantize_linear(codec, w, input_range=(-1, 1), hessian=h, effort="max")
    assert np.sqrt(off(found, w, h)) < 0.8 * np.sqrt(off(plain, w, h))
    codec.pack(found)
    if codec.dtype == "f16":
        np.testing.assert_array_equal(found.scale, found.scale.astype(np.float16).astype(np.float32))
    high = 2 ** (codec.bits - 1) - 1
    assert found.codes.min() >= (-high - 1 if codec.asymmetric else -high)
    assert found.codes.max() <= high
    np.testing.assert_array_equal(found.offset, np.rint(found.offset))


def test_static_codes_use_the_compensated_weights():
    w, h = case(2)
    codec = msmodelslim_named("w8a8.f16.i64.scales")
    found = quantize_linear(codec, w, input_range=(-4, 5), hessian=h, effort="max")
    read = codec.unpack(codec.pack(found), w.shape)
    assert off(read, w, h) < 0.64 * off(quantize_linear(codec, w, input_range=(-4, 5)), w, h)


@pytest.mark.parametrize("k", [96, 160, 320])
def test_widths_not_divisible_by_a_block(k):
    w, h = case(k, k=k)
    codec = msmodelslim_named("w8a16")
    assert off(quantize_gptq(codec, w, h), w, h) < 0.64 * off(codec.quantize(w), w, h)


def test_clip_is_searched_without_a_hessian():
    w, h = case(3)
    h = np.eye(256, dtype=np.float32)
    codec = msmodelslim_named("w4a16.g32")
    assert off(quantize_gptq(codec, w, None), w, h) < 0.95 * off(codec.quantize(w), w, h)
    scale, offset = searched_grid(codec, w, np.ones(256, np.float32))
    assert scale.shape == offset.shape == (64, 8)


@pytest.mark.parametrize("h",
    [np.full((256, 256), np.nan, np.float32), np.zeros((256, 256), np.float32),
        -np.eye(256, dtype=np.float32)])  # fmt: skip
def test_an_unusable_hessian_is_ignored(h):
    w, _ = case(4)
    codec = msmodelslim_named("w8a16")
    found = quantize_gptq(codec, w, h)
    np.testing.assert_array_equal(found.codes, quantize_gptq(codec, w, None).codes)


def test_a_singular_hessian_is_damped():
    w, _ = case(5)
    x = np.random.default_rng(50).standard_normal((20, 256)).astype(np.float32)
    h = x.T @ x / 20
    codec = msmodelslim_named("w8a16")
    assert off(quantize_gptq(codec, w, h), w, h) < 0.3 * off(codec.quantize(w), w, h)


def test_zeros_stay_zeros_and_sizes_are_checked():
    codec = msmodelslim_named("w8a16")
    _, h = case(6)
    assert not quantize_gptq(codec, np.zeros((4, 256), np.float32), h).codes.any()
    with pytest.raises(CodecError, match="Hessian does not fit"):
        quantize_gptq(codec, np.zeros((4, 128), np.float32), h)
