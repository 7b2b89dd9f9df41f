import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import polyquant
from golden import arrays, cases
from polyquant.errors import CodecError
from polyquant.testing.codecs import (
    check_dequantize,
    check_quantize_bytes,
    check_same_engines,
    check_sizes,
    same_floats,
)
from polyquant.types import Floats

DTYPES = {
    "f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16, "f64": np.float64, "i8": np.int8, "i16": np.int16,
    "i32": np.int32, "i64": np.int64, "u8": np.uint8, "u16": np.uint16, "u32": np.uint32, "u64": np.uint64,
    "bool": np.bool_,
    "f8_e4m3": ml_dtypes.float8_e4m3fn, "f8_e5m2": ml_dtypes.float8_e5m2,
}  # fmt: skip
FLOATS = ["f32", "f16", "bf16", "f64", "f8_e4m3", "f8_e5m2"]


@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_dequantize_equals_ggml(name, engine):
    found = cases(arrays(f"ggml/{name}.npz"))
    assert {"_random", "_allcodes"} <= {suffix for suffix, _, _ in found}
    for _, packed, expected in found:
        check_dequantize(name, packed, expected)


@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_quantize_gives_ggml_bytes(name, engine):
    z = arrays(f"ggml/{name}.npz")
    check_quantize_bytes(name, z["source"], z["packed"])
    check_quantize_bytes(name, z["source_edge"], z["packed_edge"])


def test_gguf_type_numbers():
    ids = {name: polyquant.codec(name).type_id for name in DTYPES}
    assert {name: i for name, i in ids.items() if i is not None} == {
        "f32": 0, "f16": 1, "i8": 24, "i16": 25, "i32": 26, "i64": 27, "f64": 28, "bf16": 30,
    }  # fmt: skip


@pytest.mark.parametrize("name", DTYPES)
def test_bytes_are_the_values(name, engine):
    """Equal to numpy (ml_dtypes) on the same random bytes, also by rows and into a given array."""
    codec, dtype = polyquant.codec(name), np.dtype(DTYPES[name])
    assert codec.dtype == dtype
    packed = np.random.default_rng(5).integers(0, 256, (4, 64 * dtype.itemsize), np.uint8)
    values = packed != 0 if name == "bool" else packed.view(dtype)
    with np.errstate(all="ignore"):
        expected = values.astype(np.float32)
    check_dequantize(name, packed, expected)
    unpacked = codec.unpack({"blocks": packed}, (4, 64)).values
    np.testing.assert_array_equal(unpacked.view(np.uint8), values.view(np.uint8))


@pytest.mark.parametrize("name", FLOATS)
def test_sizes(name, engine):
    check_sizes(name)


@pytest.mark.parametrize("name", ["f32", "f16", "bf16"])
def test_engines_agree_on_finite_floats(name):
    check_same_engines(name)


@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("target", FLOATS)
def test_conversions_between_floats(source, target, engine):
    values = np.array([[0, -0.0, 1, -1.5, 0.0625, 448, 3.0517578e-05, 2.5]], np.float32).astype(DTYPES[source])
    packed = polyquant.codec(target).pack(Floats(values))["blocks"]
    np.testing.assert_array_equal(packed, values.astype(np.float32).astype(DTYPES[target]).view(np.uint8))


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=64))
@settings(deadline=None)
def test_rounding_to_16_bits_equals_numpy(bits):
    """Every float32 but NaN, which differs in its payload."""
    w = np.array([bits], np.uint32).view(np.float32)
    w = np.where(np.isnan(w), np.float32(np.inf), w)
    with np.errstate(over="ignore"):
        for name in ("f16", "bf16"):
            packed = polyquant.codec(name).pack(Floats(w))["blocks"]
            np.testing.assert_array_equal(packed.view(np.uint16), w.astype(DTYPES[name]).view(np.uint16))


def test_nan_stays_nan(engine):
    """A NaN with a payload only in the low bits must not become infinity."""
    w = np.array([[0x7F800001, 0xFF800001, 0x7FFFFFFF]], np.uint32).view(np.float32)
    for name in ("f16", "bf16"):
        codec = polyquant.codec(name)
        assert np.isnan(codec.dequantize(codec.pack(Floats(w)), w.shape)).all()
    assert (polyquant.codec("bf16").pack(Floats(w))["blocks"].view(np.uint16) & 0x40).all()


def test_bf16_to_f32_and_back_is_exact(engine):
    every = np.arange(65536, dtype=np.uint16).view(ml_dtypes.bfloat16).reshape(256, 256)
    wide = polyquant.codec("f32").pack(Floats(every))["blocks"].view(np.float32)
    same_floats(wide, every.astype(np.float32))
    back = polyquant.codec("bf16").pack(Floats(wide))["blocks"].view(np.uint16)
    finite = ~np.isnan(wide)
    np.testing.assert_array_equal(back[finite], every.view(np.uint16)[finite])


@pytest.mark.parametrize(
    "name, values",
    [
        ("i8", np.array([[128]], np.float32)),
        ("i32", np.array([[1.5]], np.float32)),
        ("i32", np.array([[np.nan]], np.float32)),
        ("u8", np.array([[-1]], np.int64)),
        ("u64", np.array([[-1]], np.int64)),
        ("i64", np.array([[2**63]], np.uint64)),
        ("bool", np.array([[2]], np.uint8)),
        ("i8", np.array([[0.5]], ml_dtypes.bfloat16)),
    ],
)
def test_integers_are_never_changed(name, values, engine):
    with pytest.raises(CodecError, match="exactly"):
        polyquant.codec(name).pack(Floats(values))


def test_integers_that_are_exact_floats(engine):
    packed = polyquant.codec("i16").pack(Floats(np.array([[-32768, 7, 32767]], np.float32)))["blocks"]
    np.testing.assert_array_equal(packed.view(np.int16), [[-32768, 7, 32767]])


@pytest.mark.parametrize("shape", [(), (5,), (2, 0), (0, 3), (2, 3, 4)])
def test_any_shape(shape, engine):
    codec = polyquant.codec("bf16")
    w = np.ones(shape, np.float32)
    parts = codec.pack(codec.quantize(w))
    assert parts["blocks"].shape == codec.specs(shape)["blocks"].shape
    same_floats(codec.dequantize(parts, shape), w)


def test_wrong_sizes_are_refused(engine):
    with pytest.raises(CodecError, match="expected 24 bytes, found 23"):
        polyquant.codec("f32").unpack({"blocks": np.zeros((1, 23), np.uint8)}, (2, 3))


def test_large_f16_results_bypass_the_cache(engine):
    """8.4 million floats: the native kernel streams them past the cache from the first aligned address on."""
    shape = (4097, 2051)
    bits = np.random.default_rng(0).integers(0, 1 << 16, shape, np.uint16)
    found = polyquant.codec("f16").dequantize({"blocks": bits.view(np.uint8)}, shape)
    np.testing.assert_array_equal(found, bits.view(np.float16).astype(np.float32))
