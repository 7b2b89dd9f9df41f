import numpy as np
import pytest

import polyquant
from golden import arrays
from polyquant.errors import CodecError
from polyquant.testing.codecs import check_dequantize
from polyquant.types import Ternary

CODEC = polyquant.codec("trinity.tq2_0")


def test_equals_its_dequantizer(engine):
    z = arrays("trinity/trinity_tq2_0_32x10.npz")
    check_dequantize("trinity.tq2_0", z["packed"], z["dequant"])


def test_unpack_and_pack_round_trip(engine):
    z = arrays("trinity/trinity_tq2_0_32x10.npz")
    codes = CODEC.unpack({"blocks": z["packed"]}, (64, 32))
    again = CODEC.unpack(CODEC.pack(codes), (64, 32))
    np.testing.assert_array_equal(again.codes, codes.codes)
    used = codes.codes.any(axis=1)
    np.testing.assert_array_equal(again.scale[used], codes.scale[used])


def test_quantize(engine):
    rng = np.random.default_rng(0)
    exact = rng.integers(-1, 2, (6, 96)).astype(np.float32) * np.repeat(np.float32([[0.5, 2, 0.25]]), 32, axis=1)
    parts = CODEC.pack(CODEC.quantize(exact))
    assert parts["blocks"].shape == CODEC.specs(exact.shape)["blocks"].shape
    np.testing.assert_array_equal(CODEC.dequantize(parts, exact.shape), exact)
    w = rng.standard_normal((4, 64)).astype(np.float32)
    d = np.abs(w.reshape(4, 2, 32)).max(axis=2, keepdims=True)
    expected = np.sign(np.trunc(w.reshape(4, 2, 32) / d * 2))
    np.testing.assert_array_equal(CODEC.quantize(w).codes.reshape(4, 2, 32), expected)


def test_mismatched_parts_are_reported(engine):
    with pytest.raises(CodecError, match="multiple of 32"):
        CODEC.specs((2, 33))
    with pytest.raises(CodecError, match="do not fit"):
        CODEC.dequantize({"blocks": np.zeros((2, 11), np.uint8)}, (2, 32))
    with pytest.raises(CodecError, match="do not fit"):
        CODEC.dequantize({"blocks": np.zeros((2, 11), np.uint8)}, (2, 32), rows=slice(0, 1))
    with pytest.raises(CodecError, match="NaN or infinity"):
        CODEC.quantize(np.full((1, 32), np.nan, np.float32))
    with pytest.raises(CodecError, match="fp16"):
        CODEC.pack(Ternary(np.ones((1, 32), np.int8), np.float32([1e6])))
    with pytest.raises(CodecError, match="per 32"):
        CODEC.pack(Ternary(np.ones((1, 32), np.int8), np.ones((1, 2), np.float32)))
