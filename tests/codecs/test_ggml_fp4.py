import numpy as np
import pytest

import polyquant
from golden import arrays, cases
from polyquant.testing.codecs import check_dequantize, check_quantize_bytes, check_same_engines, check_sizes

NAMES = ["mxfp4", "nvfp4"]


@pytest.mark.parametrize("name", NAMES)
def test_dequantize_equals_ggml(name, engine):
    found = cases(arrays(f"ggml/{name}.npz"))
    assert {"_random", "_allscales"} <= {suffix for suffix, _, _ in found}
    for _, packed, expected in found:
        check_dequantize(name, packed, expected)


@pytest.mark.parametrize("name", NAMES)
def test_quantize_gives_ggml_bytes(name, engine):
    z = arrays(f"ggml/{name}.npz")
    check_quantize_bytes(name, z["source"], z["packed"])
    check_quantize_bytes(name, z["source_edge"], z["packed_edge"])
    check_quantize_bytes(name, z["source"], z["packed_imatrix"], z["imatrix"])


@pytest.mark.parametrize("name", NAMES)
def test_sizes(name, engine):
    check_sizes(name)


@pytest.mark.parametrize("name", NAMES)
def test_engines_agree_on_finite_floats(name):
    check_same_engines(name)


def test_every_code_survives(engine):
    """The sixteen values times a power of two survive, except -0."""
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    w = np.concatenate([values, -values, values[::-1], -values])[None] * np.float32(0.25)
    codec = polyquant.codec("mxfp4")
    back = codec.dequantize(codec.pack(codec.quantize(w)), w.shape)
    np.testing.assert_array_equal(back, w)
    assert not np.signbit(back[back == 0]).any()


@pytest.mark.parametrize("below, e", [(0, 225), (1, 225), (40, 225), (50, 224), (200, 224)])
def test_scale_just_below_a_power_of_two(below, e, engine):
    """log2 in float32 rounds up very near a power of two: up to 44 ulp below 2^100 count as 2^100."""
    w = np.zeros((1, 32), np.float32)
    w[0, 0] = (np.float32(2.0**100).view(np.uint32) - np.uint32(below)).view(np.float32)
    codec = polyquant.codec("mxfp4")
    assert codec.pack(codec.quantize(w))["blocks"][0, 0] == e


@pytest.mark.parametrize("amax, e", [(1e-45, 0), (2.0**-126, 0), (2.0**-125, 0), (2.0**-124, 1), (3.4028235e38, 252)])
def test_scale_at_the_ends(amax, e, engine):
    w = np.zeros((1, 32), np.float32)
    w[0, 3] = -amax
    codec = polyquant.codec("mxfp4")
    packed = codec.pack(codec.quantize(w))
    assert packed["blocks"][0, 0] == e
    assert np.isfinite(codec.dequantize(packed, w.shape)).all()


def test_nvfp4_saturates_above_its_largest_scale(engine):
    w = np.full((1, 64), 1e9, np.float32)
    codec = polyquant.codec("nvfp4")
    packed = codec.pack(codec.quantize(w))["blocks"][0]
    assert (packed[:4] == 0x7E).all()
    assert (packed[4:] == 0x77).all()
