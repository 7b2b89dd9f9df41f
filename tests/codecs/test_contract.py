"""Every codec of the registry keeps the same contract, whoever calls it with whatever: shapes, dtypes, slices, nonsense."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import polyquant
from contract import same_floats
from polyquant.errors import CodecError, UnsupportedError
from polyquant.registry import CODECS

K = 1536  # every block, both tiles of TL
WHOLE = {"i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64", "bool"}
TERNARY = {n for n in CODECS if n.startswith(("i2_s", "trinity", "tl", "hf_bitnet", "tq"))}
READ_ONLY = {"iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s"}
WRITABLE = sorted(set(CODECS) - READ_ONLY)
TILES = {"tl1": (128, 128, 32), "tl2": (128, 96, 32)}


def codec_of(name):
    if name.startswith("trellis"):  # the reference of the encoder takes its time
        return polyquant.codec(name, window_bits=8)
    return polyquant.codec(name, tile=TILES[name]) if name in TILES else polyquant.codec(name)


def rows_of(name):
    return 128 if name in TILES else 16


def source(name):
    """Float32 [rows, K] that the codec can hold: whole numbers, ternary weights (a scale of 1 where none is kept), gaussians."""
    rng, rows = np.random.default_rng(7), rows_of(name)
    if name in WHOLE:
        return rng.integers(0, 2, (rows, K)).astype(np.float32)
    if name in TERNARY:
        scale = 1 if name.startswith("trinity") else 0.5
        return rng.integers(-1, 2, (rows, K)).astype(np.float32) * np.float32(scale)
    return rng.standard_normal((rows, K)).astype(np.float32)


def there_and_back(codec, w, shape):
    return codec.dequantize(codec.pack(codec.quantize(w)), shape)


@pytest.fixture(autouse=True)
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize("name", WRITABLE)
def test_parts_are_what_specs_says_and_survive_the_round(name, engine):
    codec, w = codec_of(name), source(name)
    parts, specs = codec.pack(codec.quantize(w)), codec.specs(w.shape)
    assert {k: (p.shape, p.dtype) for k, p in parts.items()} == {k: (s.shape, s.dtype) for k, s in specs.items()}
    again = codec.pack(codec.unpack(parts, w.shape))
    for key, array in parts.items():
        np.testing.assert_array_equal(again[key], array)
    back = codec.dequantize(parts, w.shape)
    assert back.dtype == np.float32 and back.shape == w.shape
    miss = float(((back - w) ** 2).sum() / (w**2).sum())
    exact = name in TERNARY | WHOLE | {"f32", "f64"}
    coarse = {"q1_0": 0.5, "q2_0": 0.6, "q2_k": 0.15, "trellis.2": 0.1}
    assert miss == 0 if exact else miss < coarse.get(name, 0.05), miss
    for key in parts:
        parts[key].flags.writeable = False  # as maps of files are
    same_floats(codec.dequantize(parts, w.shape), back)


@pytest.mark.parametrize("name", WRITABLE)
def test_any_real_array_gives_the_same(name, engine):
    codec, w = codec_of(name), source(name)
    expected = there_and_back(codec, w, w.shape)
    frozen = w.copy()
    frozen.flags.writeable = False
    half = w.astype(np.float16)
    forms = {
        "float64": w.astype(np.float64),
        "the other byte order": w.astype(w.dtype.newbyteorder()),
        "strided": np.repeat(w, 2, axis=1)[:, ::2],
        "reversed": np.ascontiguousarray(w[::-1, ::-1])[::-1, ::-1],
        "Fortran's order": np.asfortranarray(w),
        "read-only": frozen,
    }
    for form, array in forms.items():
        np.testing.assert_array_equal(there_and_back(codec, array, w.shape), expected, err_msg=form)
    np.testing.assert_array_equal(
        there_and_back(codec, half, w.shape), there_and_back(codec, half.astype(np.float32), w.shape)
    )


@pytest.mark.parametrize("name", WRITABLE)
def test_shapes(name, engine):
    codec, w = codec_of(name), source(name)
    expected = there_and_back(codec, w, w.shape)
    deep = (2, len(w) // 2, K)
    back = there_and_back(codec, w.reshape(deep), deep)
    assert back.shape == deep
    np.testing.assert_array_equal(back.reshape(w.shape), expected)
    assert there_and_back(codec, w[:0], (0, K)).shape == (0, K)
    if codec.granule[0] == 1 and name not in TILES:
        assert there_and_back(codec, w[0], (K,)).shape == (K,)
    else:
        with pytest.raises(CodecError, match=r"\[1, 1536\]|\[1536\]"):
            there_and_back(codec, w[0], (K,))
    if codec.granule[1] > 1:
        with pytest.raises(CodecError, match="shape"):
            codec.specs((len(w), K + 1))


@pytest.mark.parametrize("name", WRITABLE)
def test_rows_and_out(name, engine):
    codec, w = codec_of(name), source(name)
    parts = codec.pack(codec.quantize(w))
    whole = codec.dequantize(parts, w.shape)
    for rows in (
        (slice(0, 4), slice(len(w) - 4, None), slice(8, 8), slice(len(w), 2 * len(w))) if codec.row_sliced else ()
    ):
        np.testing.assert_array_equal(codec.dequantize(parts, w.shape, rows=rows), whole[rows])
    out = np.full(w.shape, 7, np.float32)
    assert codec.dequantize(parts, w.shape, out=out) is out
    same_floats(out, whole)
    frozen = np.empty(w.shape, np.float32)
    frozen.flags.writeable = False
    bad = [np.empty(3, np.float32), np.empty(w.shape), np.empty(w.shape, np.float32, order="F"), frozen]
    for array in bad:
        with pytest.raises(CodecError, match="out must be"):
            codec.dequantize(parts, w.shape, out=array)


@pytest.mark.parametrize("name", WRITABLE)
def test_nonsense_is_refused_in_one_line(name, engine):
    codec, w = codec_of(name), source(name)
    parts = codec.pack(codec.quantize(w))
    for wrong in (w.astype(complex), w.astype(str), w.astype(object), "text", None):
        with pytest.raises(CodecError, match="real numbers"):
            codec.quantize(wrong)
    short = {key: part.reshape(-1)[:-1] for key, part in parts.items()}
    floats = {key: part.astype(np.float64) for key, part in parts.items()}
    for wrong in ({}, {"codes": w}, short, floats):
        for verb in (codec.dequantize, codec.unpack):
            with pytest.raises(CodecError) as caught:
                verb(wrong, w.shape)
            assert "\n" not in str(caught.value)
    with pytest.raises(CodecError):
        codec.dequantize(parts, (2 * len(w), K))
    with pytest.raises((TypeError, CodecError), match="nonsense"):
        polyquant.codec(name, nonsense=1)


@pytest.mark.parametrize(
    "name",
    [
        n
        for n in WRITABLE
        if n not in TERNARY | WHOLE
        and not n.startswith(("f", "bf"))
        and (n == "trellis.3" or not n.startswith("trellis"))
    ],
)
def test_importance_is_checked(name):
    codec, w = codec_of(name), source(name)
    good = np.linspace(0, 2, K)  # zero is allowed: an input that was never active
    for importance in (good, good.astype(np.float32), list(good), good.astype(np.float16)):
        parts = codec.pack(codec.quantize(w, importance=importance))
        assert {k: p.shape for k, p in parts.items()} == {k: s.shape for k, s in codec.specs(w.shape).items()}
    for wrong in (np.nan, np.inf, -1.0):
        with pytest.raises(CodecError, match="finite and not negative"):
            codec.quantize(w, importance=np.full(K, wrong))
    for wrong in (good[1:], np.ones((16, K)), 1.0):
        with pytest.raises(CodecError, match="one entry per column"):
            codec.quantize(w, importance=wrong)
    with pytest.raises(CodecError, match="real numbers"):
        codec.quantize(w, importance="x")


@pytest.mark.parametrize("name", sorted(READ_ONLY))
def test_types_that_are_only_read_say_so(name):
    with pytest.raises(UnsupportedError, match="can be read, not written"):
        polyquant.codec(name).quantize(source(name))


@pytest.mark.parametrize("name", sorted(READ_ONLY))
def test_types_that_are_only_read_take_any_bytes(name, engine):
    codec = polyquant.codec(name)
    spec = codec.specs((8, 512))["blocks"]
    parts = {"blocks": np.random.default_rng(1).integers(0, 256, spec.shape, np.uint8)}
    whole = codec.dequantize(parts, (8, 512))
    assert whole.shape == (8, 512)
    same_floats(codec.dequantize(parts, (8, 512), rows=slice(2, 5)), whole[2:5])


def test_a_name_that_no_codec_has():
    with pytest.raises(polyquant.PolyquantError, match="did you mean q4_k"):
        polyquant.codec("q4k")
