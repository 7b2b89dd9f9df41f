"""The error of trellis codes on unit Gaussian values: figures that must not get worse."""

import numpy as np
import pytest

import polyquant as pq
from polyquant.ops import native

BARS = {2: 0.0726, 3: 0.0189, 4: 0.0052}
"""Window 12, one scale for each output, not rotated."""


@pytest.fixture(scope="module")
def weight():
    return np.random.default_rng(0).standard_normal((256, 4096)).astype(np.float32)


@pytest.mark.skipif(native.lib() is None, reason="the numpy encoder would take an hour")
@pytest.mark.parametrize("bits", BARS)
def test_mean_squared_error(bits, weight):
    codec = pq.codec(f"trellis.{bits}", window_bits=12, hadamard=False, groups=1)
    found = codec.dequantize(codec.pack(codec.quantize(weight)), weight.shape)
    assert np.square(found - weight, dtype=np.float64).mean() <= BARS[bits]


@pytest.mark.skipif(native.lib() is None, reason="the numpy encoder would take minutes")
@pytest.mark.parametrize("bits", [5, 6, 7, 8])
def test_more_bits_lower_the_error_also_for_large_values(bits, weight):
    """Each bit removes almost three quarters of the error; a value beyond the codebook would be noticed."""
    w = weight[:32, :512].copy()
    w[3, 7] = 5.5
    errors = []
    for b in (bits - 1, bits):
        codec = pq.codec(f"trellis.{b}", window_bits=14, hadamard=False, groups=1)
        found = codec.dequantize(codec.pack(codec.quantize(w)), w.shape)
        errors.append(np.square(found - w, dtype=np.float64).mean())
    assert errors[1] < 0.4 * errors[0]
