import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import polyquant
from golden import arrays, cases
from polyquant.errors import CodecError
from polyquant.ops import native
from polyquant.testing.codecs import (
    awkward_floats,
    check_dequantize,
    check_quantize_bytes,
    check_same_engines,
    check_sizes,
    same_floats,
)
from polyquant.types import Ternary

NAMES = ["tq1_0", "tq2_0"]


@pytest.mark.parametrize("name", NAMES)
def test_dequantize_equals_ggml(name, engine):
    found = cases(arrays(f"ggml/{name}.npz"))
    assert {"_random", "_ternary"} | ({"_allcodes"} if name == "tq1_0" else set()) <= {suffix for suffix, _, _ in found}
    for _, packed, expected in found:
        check_dequantize(name, packed, expected)


@pytest.mark.parametrize("name", NAMES)
def test_quantize_gives_ggml_bytes(name, engine):
    z = arrays(f"ggml/{name}.npz")
    for suffix in ("", "_edge", "_ternary"):
        check_quantize_bytes(name, z[f"source{suffix}"], z[f"packed{suffix}"])
    check_quantize_bytes(name, z["source"], z["packed_imatrix"], z["imatrix"])


@pytest.mark.parametrize("name", NAMES)
def test_unpack_gives_the_codes_and_their_scales(name, engine):
    z = arrays(f"ggml/{name}.npz")
    codec = polyquant.codec(name)
    found = codec.unpack({"blocks": z["packed_ternary"]}, (4, 512))
    np.testing.assert_array_equal(found.codes, np.sign(z["source_ternary"]))
    assert found.scale.shape == (4, 2)
    same_floats(found.codes * np.repeat(found.scale, 256, axis=1), z["dequant_ternary"])


@pytest.mark.parametrize("name", NAMES)
def test_sizes(name, engine):
    check_sizes(name)


@pytest.mark.parametrize("name", NAMES)
def test_engines_agree_on_finite_floats(name):
    check_same_engines(name)


@given(st.integers(0, 2**31), st.sampled_from(NAMES))
@settings(deadline=None, max_examples=20)
def test_codes_survive(seed, name):
    rng = np.random.default_rng(seed)
    codes = rng.integers(-1, 2, (3, 512), np.int8)
    scale = rng.choice(np.array([1, 0.5, -0.25], np.float32), (3, 2))
    codec = polyquant.codec(name)
    packed = []
    for which in ("native", "numpy"):
        with native.engine(which):
            parts = codec.pack(Ternary(codes, scale))
            again = codec.unpack(parts, (3, 512))
            np.testing.assert_array_equal(again.codes, codes)
            np.testing.assert_array_equal(again.scale, scale)
            packed.append(parts["blocks"])
    np.testing.assert_array_equal(packed[0], packed[1])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(1,), (4, 1), (4, 2), (4, 4)])
def test_scales_of_every_valid_shape(name, shape, engine):
    rng = np.random.default_rng(7)
    codes = rng.integers(-1, 2, (4, 1024), np.int8)
    scale = rng.random(shape, np.float32) + np.float32(0.1)
    codec = polyquant.codec(name)
    parts = codec.pack(Ternary(codes, scale))
    groups = 1 if scale.ndim == 1 else shape[1]
    wide = np.repeat(np.broadcast_to(scale.reshape(-1, groups), (4, groups)), 1024 // groups, axis=1)
    rounded = wide.astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(codec.dequantize(parts, codes.shape), codes * rounded)


def test_a_block_of_zeros_stores_no_scale(engine):
    codes = np.zeros((1, 512), np.int8)
    codes[0, 300] = -1
    found = polyquant.codec("tq2_0").pack(Ternary(codes, np.array([3], np.float32)))["blocks"].reshape(2, 66)
    np.testing.assert_array_equal(found[:, -2:].copy().view(np.float16)[:, 0], [0, 3])


@pytest.mark.parametrize(
    "scale", [np.ones((2, 3)), np.ones((3, 1)), np.ones((2, 8)), np.ones(2), np.ones((2, 0)), np.ones(())]
)
def test_invalid_scales_are_refused(scale, engine):
    with pytest.raises(CodecError, match="scale"):
        polyquant.codec("tq1_0").pack(Ternary(np.zeros((2, 1024), np.int8), scale.astype(np.float32)))


def test_codes_beyond_one_are_refused(engine):
    codes = np.full((1, 256), 2, np.int8)
    with pytest.raises(CodecError, match=r"-1, 0, \+1"):
        polyquant.codec("tq2_0").pack(Ternary(codes, np.ones(1, np.float32)))


def test_bits_11_decode_to_two(engine):
    packed = np.full((1, 66), 0xFF, np.uint8)
    packed[0, -2:] = np.array([1], np.float16).view(np.uint8)
    codec = polyquant.codec("tq2_0")
    assert (codec.dequantize({"blocks": packed}, (1, 256)) == 2).all()
    assert (codec.unpack({"blocks": packed}, (1, 256)).codes == 2).all()


def test_scale_is_kept_unrounded_until_packed(engine):
    w = awkward_floats(3, (2, 256)) * 0 + np.float32(0.1)
    assert (polyquant.codec("tq1_0").quantize(w).scale == np.float32(0.1)).all()


def test_empty_matrices(engine):
    for name in NAMES:
        codec = polyquant.codec(name)
        assert codec.pack(codec.quantize(np.zeros((0, 256), np.float32)))["blocks"].shape == (0, codec.type_size)
