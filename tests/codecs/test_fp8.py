"""8-bit floats with scales: names, sizes, values, errors."""

import ml_dtypes
import numpy as np
import pytest

import polyquant
from polyquant.errors import CodecError, UnknownNameError, UnsupportedError


@pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
@pytest.mark.parametrize(
    ("words", "table"), [("", (5, 1)), (".tensor", (1,)), (".b4", (2, 2)), (".b4.inv.f32", (2, 2))]
)
def test_values(kind, words, table):
    codec = polyquant.codec(f"fp8.{kind}{words}")
    rng = np.random.default_rng(0)
    specs = codec.specs((5, 7))
    assert specs[codec.scale].shape == table
    weight = rng.standard_normal((5, 7)).astype(specs["weight"].dtype)
    scale = rng.uniform(0.1, 2, table).astype(specs[codec.scale].dtype)
    wide = scale.astype(np.float32)
    if ".b4" in words:  # the last block is cut off by the edge on both sides
        wide = np.array([[wide[i // 4, j // 4] for j in range(7)] for i in range(5)])
    want = weight.astype(np.float32) * wide
    parts = {"weight": weight, codec.scale: scale}
    np.testing.assert_array_equal(codec.dequantize(parts, (5, 7)), want)
    np.testing.assert_array_equal(codec.dequantize(parts, (5, 7), rows=slice(3, 5)), want[3:5])
    x = rng.standard_normal((2, 7)).astype(np.float32)
    np.testing.assert_array_equal(codec.multiply(parts, (5, 7), x, "block"), x @ want.T)
    with pytest.raises(CodecError, match="does not fit"):
        codec.dequantize({**parts, "weight": weight.astype(np.float32)}, (5, 7))


@pytest.mark.parametrize(
    "name", ["fp8", "fp8.e3m4", "fp8.e4m3.bf16", "fp8.e4m3.b0", "fp8.e4m3.b128.tensor", "fp8.e4m3.f32.inv"]
)
def test_unknown_names(name):
    with pytest.raises(UnknownNameError):
        polyquant.codec(name)


def test_quantizing_is_refused():
    codec = polyquant.codec("fp8.e4m3")
    with pytest.raises(UnsupportedError, match="is read-only"):
        codec.quantize(np.zeros((2, 2), np.float32))
    codes = codec.unpack({"weight": np.zeros((2, 2), ml_dtypes.float8_e4m3fn)}, (2, 2))
    with pytest.raises(UnsupportedError, match="is read-only"):
        codec.pack(codes)
    with pytest.raises(CodecError, match="needs a matrix"):
        codec.specs((2, 2, 2))
