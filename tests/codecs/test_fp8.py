"""8-bit floats with scales: names, sizes, values, errors."""

import ml_dtypes
import numpy as np
import pytest

import polyquant
from polyquant.errors import CodecError, UnknownNameError
from polyquant.testing.codecs import check_codec


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
    np.testing.assert_array_equal(codec.multiply(parts, (5, 7), x, "none"), x @ want.T)
    halves = x.astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(codec.multiply(parts, (5, 7), x, "block"), halves @ want.T)
    with pytest.raises(CodecError, match="does not fit"):
        codec.dequantize({**parts, "weight": weight.astype(np.float32)}, (5, 7))


@pytest.mark.parametrize(
    "name", ["fp8", "fp8.e3m4", "fp8.e4m3.bf16", "fp8.e4m3.b0", "fp8.e4m3.b128.tensor", "fp8.e4m3.f32.inv"]
)
def test_unknown_names(name):
    with pytest.raises(UnknownNameError):
        polyquant.codec(name)


@pytest.mark.parametrize("name", ["fp8.e4m3", "fp8.e5m2.f32", "fp8.e4m3.tensor.f32", "fp8.e4m3.b32.inv.e8m0"])
@pytest.mark.parametrize("shape", [(40, 70), (64, 32), (2, 5)])
def test_contract(name, shape, engine):
    w = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    check_codec(polyquant.codec(name), w, error=0.01 if "e5m2" in name else 0.002)


def test_shapes():
    with pytest.raises(CodecError, match="needs a matrix"):
        polyquant.codec("fp8.e4m3").specs((2, 2, 2))
