import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import polyquant
from golden import arrays, cases
from polyquant.errors import CodecError
from polyquant.ops import native
from polyquant.testing.codecs import (
    check_dequantize,
    check_quantize_bytes,
    check_same_engines,
    check_sizes,
    weighted_error,
)

NAMES = ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q8_1", "q1_0", "q2_0"]
SEARCHED = ["q4_0", "q4_1", "q5_0", "q5_1"]


@pytest.mark.parametrize("name", [n for n in NAMES if n != "q8_1"])
def test_dequantize_equals_ggml(name, engine):
    found = cases(arrays(f"ggml/{name}.npz"))
    assert len(found) >= 4
    for _, packed, expected in found:
        check_dequantize(name, packed, expected)


def test_q8_1_decodes_to_code_times_scale(engine):
    packed = arrays("ggml/q8_1.npz")["packed_random"]
    blocks = packed.reshape(-1, 36)
    d = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    expected = (blocks[:, 4:].view(np.int8).astype(np.float32) * d).reshape(len(packed), -1)
    check_dequantize("q8_1", packed, expected)


@pytest.mark.parametrize("name", NAMES)
def test_quantize_gives_ggml_bytes(name, engine):
    z = arrays(f"ggml/{name}.npz")
    for suffix in ("", "_edge", "_ternary"):
        if f"source{suffix}" in z:
            check_quantize_bytes(name, z[f"source{suffix}"], z[f"packed{suffix}"])


@pytest.mark.parametrize("name", [n for n in NAMES if n != "q8_1"])
def test_quantize_under_importance_gives_ggml_bytes(name, engine):
    z = arrays(f"ggml/{name}.npz")
    check_quantize_bytes(name, z["source"], z["packed_imatrix"], z["imatrix"])


@pytest.mark.parametrize("name", SEARCHED)
def test_search_lowers_the_weighted_error(name, engine):
    z = arrays(f"ggml/{name}.npz")
    codec, w = polyquant.codec(name), z["source"]
    plain, searched = (codec.pack(codec.quantize(w, importance=i)) for i in (None, z["imatrix"]))
    assert weighted_error(name, searched, w, z["imatrix"]) < weighted_error(name, plain, w, z["imatrix"])


@pytest.mark.parametrize("name", NAMES)
def test_sizes(name, engine):
    check_sizes(name)


@pytest.mark.parametrize("name", NAMES)
def test_engines_agree_on_finite_floats(name):
    check_same_engines(name)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("blocks", [1, 7, 8, 9, 24])
def test_engines_agree_where_the_largest_magnitudes_have_both_signs(name, blocks):
    codec = polyquant.codec(name)
    x = np.random.default_rng(blocks).integers(-2, 3, (3, 128 * blocks)).astype(np.float32)
    x[0, : 64 * blocks] = 0
    x[1, : 64 * blocks] *= np.float32(1e-40)
    made = []
    for which in ("native", "numpy"):
        with native.engine(which):
            made.append(codec.pack(codec.quantize(x))["blocks"])
    np.testing.assert_array_equal(made[0], made[1])


@pytest.mark.parametrize("name", SEARCHED)
def test_engines_agree_in_the_search(name):
    check_same_engines(name, searched=True)


@pytest.mark.parametrize("name", NAMES)
def test_engines_decode_random_bytes_to_equal_floats(name):
    codec = polyquant.codec(name)
    shape = (3, 256)
    packed = np.random.default_rng(1).integers(0, 256, codec.specs(shape)["blocks"].shape, np.uint8)
    decoded = []
    for which in ("native", "numpy"):
        with native.engine(which):
            decoded.append(codec.dequantize({"blocks": packed}, shape))
    np.testing.assert_array_equal(decoded[0], decoded[1])


@given(st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=200)
def test_rounding_is_half_away(bits):
    from polyquant.ops.rounding import half_away

    x = np.array([bits], np.uint32).view(np.float32)
    if np.abs(x[0]) < 2**22:
        exact = float(x[0])
        expected = np.copysign(np.floor(abs(exact) + 0.5), exact)
        assert half_away(x)[0] == expected


def test_rows_of_odd_length_are_refused(engine):
    with pytest.raises(CodecError, match="multiple of 32"):
        polyquant.codec("q4_0").quantize(np.zeros((2, 48), np.float32))


def test_importance_of_the_wrong_length_is_refused(engine):
    with pytest.raises(CodecError, match="importance"):
        polyquant.codec("q4_0").quantize(np.zeros((2, 64), np.float32), importance=np.ones(32, np.float32))


@pytest.mark.parametrize("name", NAMES)
def test_fields_cover_every_scale(name):
    """Swapping the fields twice changes nothing; swapping once moves exactly the bytes that are not codes."""
    codec = polyquant.codec(name)
    touched = sum(size * count for _, size, count in codec.fields)
    codes = {"q8_0": 32, "q8_1": 32, "q1_0": 16, "q2_0": 16}.get(name, 16)
    assert touched == codec.type_size - codes
