import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import polyquant
from golden import VECTORS, arrays
from polyquant.codecs.i2_s import likely_zero_symbol, symbol_histogram
from polyquant.errors import CodecError
from polyquant.testing.codecs import same_floats
from polyquant.types import Ternary

LAYOUTS = {"x86_128": "i2_s.x86", "x86_1x4": "i2_s.x4", "arm_64": "i2_s.arm"}
FILES = sorted(p.name for p in (VECTORS / "i2_s").glob("*.npz"))
TERNARY = [f for f in FILES if "nonternary" not in f and "allbytes" not in f]


def load(file):
    z = arrays(f"i2_s/{file}")
    return polyquant.codec(LAYOUTS[str(z["layout"])]), tuple(int(d) for d in z["shape"]), z


def test_vectors_exist():
    assert len(TERNARY) == 18


@pytest.mark.parametrize("file", TERNARY)
def test_encode_and_decode_equal_bitnet_cpp(file, engine):
    codec, shape, z = load(file)
    codes = codec.quantize(z["source"])
    parts = codec.pack(codes)
    np.testing.assert_array_equal(parts["blocks"], z["packed"])
    spec = codec.specs(shape)["blocks"]
    assert (parts["blocks"].shape, parts["blocks"].dtype) == (spec.shape, spec.dtype)
    back = codec.unpack({"blocks": z["packed"]}, shape)
    np.testing.assert_array_equal(back.codes, z.get("ternary", np.zeros(shape)))
    assert back.scale == z["scale"]
    same_floats(codec.dequantize(parts, shape), back.codes * back.scale)
    same_floats(codec.dequantize(parts, shape), z.get("dequant_ik_llama", back.codes * back.scale))


@pytest.mark.parametrize("file", [f for f in FILES if "nonternary" in f])
def test_weights_that_are_not_ternary(file, engine):
    codec, _, z = load(file)
    with pytest.raises(CodecError, match="lossy=True"):
        codec.quantize(z["source"])
    lossy = polyquant.codec(codec, lossy=True)
    np.testing.assert_array_equal(lossy.pack(lossy.quantize(z["source"]))["blocks"], z["packed"])


def test_the_official_converter_agrees():
    for file in FILES:
        codec, _, z = load(file)
        if "packed_official_python" in z:
            np.testing.assert_array_equal(
                codec.pack(codec.quantize(z["source"]))["blocks"], z["packed_official_python"]
            )


def test_every_byte_value(engine):
    """Defined symbols as ik_llama.cpp decodes them; the undefined symbol 3 is 0 for us, +2 there."""
    codec, shape, z = load("i2_s_x86_128_allbytes_8x128.npz")
    undefined = z["dequant_ik_llama"] == 2 * z["scale"]
    assert undefined.sum() == codec.count_undefined({"blocks": z["packed"]}, shape) > 0
    same_floats(codec.dequantize({"blocks": z["packed"]}, shape), np.where(undefined, 0, z["dequant_ik_llama"]))


@pytest.mark.parametrize("name", ["i2_s.x86", "i2_s.arm", "i2_s.x4", "trinity.i2_s"])
@pytest.mark.parametrize("shape", [(8, 128), (12, 96), (4, 320), (3, 4, 32)])
def test_row_ranges_and_out(name, shape, engine):
    codec = polyquant.codec(name)
    rng = np.random.default_rng(1)
    parts = {"blocks": rng.integers(0, 256, codec.specs(shape)["blocks"].shape, np.uint8)}
    whole = codec.dequantize(parts, shape)
    matrix = whole.reshape(-1, shape[-1])
    out = np.full(shape, 7, np.float32)
    assert codec.dequantize(parts, shape, out=out) is out
    same_floats(out, whole)
    for rows in (slice(1, 3), slice(0, 0), slice(2, None), slice(None)):
        got = codec.dequantize(parts, shape, rows=rows)
        assert got.shape == matrix[rows].shape
        same_floats(got, matrix[rows])


@pytest.mark.parametrize("name", ["i2_s.x86", "i2_s.arm", "i2_s.x4", "trinity.i2_s"])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_native_equals_numpy_on_random_bytes(name, data):
    from polyquant.ops import native

    if native.lib() is None:
        pytest.skip("native kernels are not built or switched off")
    codec = polyquant.codec(name)
    rows = data.draw(st.integers(0, 3)) * codec.granule[0]
    k = data.draw(st.integers(1, 9)) * codec.granule[1]
    seed = data.draw(st.integers(0, 2**32 - 1))
    parts = {"blocks": np.random.default_rng(seed).integers(0, 256, codec.specs((rows, k))["blocks"].shape, np.uint8)}
    results = []
    for which in ("native", "numpy"):
        with native.engine(which):
            codes = codec.unpack(parts, (rows, k))
            results.append(
                (
                    codes.codes.tobytes(),
                    codec.pack(codes)["blocks"].tobytes(),
                    codec.symbol_histogram(parts, (rows, k)).tolist(),
                )
            )
            floats = codec.dequantize(parts, (rows, k))
            same_floats(floats, codes.codes * codes.scale if np.isfinite(codes.scale).all() else floats)
    assert results[0] == results[1]
    assert sum(results[0][2]) == rows * k
    assert symbol_histogram(parts, (rows, k)).tolist() == results[0][2]


def test_trinity_decodes_like_its_kernel(engine):
    """Its matrix-vector product, computed from our codes."""
    z = arrays("trinity/trinity_trit_lut_matvec_16x100.npz")
    codec, shape = polyquant.codec("trinity.i2_s"), tuple(int(d) for d in z["shape"])
    codes = codec.unpack({"blocks": z["packed"].reshape(-1)}, shape)
    exact = codes.codes.astype(np.float64) @ z["input"].astype(np.float64)
    np.testing.assert_allclose(z["output"], exact, rtol=1e-5, atol=1e-5)
    assert codes.scale == 1
    again = codec.unpack(codec.pack(codes), shape)
    np.testing.assert_array_equal(again.codes, codes.codes)


@pytest.mark.parametrize("cols", [4, 5, 6, 7, 100])
def test_trinity_pads_its_rows(cols, engine):
    codec = polyquant.codec("trinity.i2_s")
    w = np.random.default_rng(cols).integers(-1, 2, (3, cols)).astype(np.float32)
    parts = codec.pack(codec.quantize(w))
    assert parts["blocks"].shape == codec.specs(w.shape)["blocks"].shape == (3 * -(-cols // 4),)
    same_floats(codec.dequantize(parts, w.shape), w)
    same_floats(codec.dequantize(parts, w.shape, rows=slice(1, 3)), w[1:])
    assert codec.symbol_histogram(parts, w.shape).tolist() == [int((w == v).sum()) for v in (0, 1, -1)] + [0]


def test_trinity_has_no_scale():
    codec, w = polyquant.codec("trinity.i2_s"), np.float32([[0.5, 0, -0.5, 0.5]])
    with pytest.raises(CodecError, match="cannot store a scale"):
        codec.quantize(w)
    lossy = polyquant.codec("trinity.i2_s", lossy=True)
    same_floats(codec.dequantize(lossy.pack(lossy.quantize(w)), w.shape), np.sign(w))


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("i2_s.x86", (3, 32), "multiple of 128 weights"),
        ("i2_s.arm", (3, 32), "multiple of 64 weights"),
        ("i2_s.x4", (6, 128), "multiple of 4 rows"),
    ],
)
def test_shapes_with_partial_blocks_are_refused(name, shape, message):
    codec = polyquant.codec(name)
    for call in (codec.specs, lambda s: codec.pack(codec.quantize(np.zeros(s, np.float32)))):
        with pytest.raises(CodecError, match=message):
            call(shape)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("lossy", [False, True])
def test_nan_and_infinity_are_refused(bad, lossy, engine):
    w = np.zeros((1, 128), np.float32)
    w[0, 5] = bad
    with pytest.raises(CodecError, match="NaN or infinity"):
        polyquant.codec("i2_s.x86", lossy=lossy).quantize(w)


def test_mismatched_arrays(engine):
    codec = polyquant.codec("i2_s.x86")
    for blocks in (np.zeros(64, np.int8), np.zeros(63, np.uint8), np.zeros(65, np.uint8)):
        with pytest.raises(CodecError, match="do not fit"):
            codec.unpack({"blocks": blocks}, (1, 128))
    with pytest.raises(CodecError, match="out must be"):
        codec.dequantize({"blocks": np.zeros(64, np.uint8)}, (1, 128), out=np.zeros((1, 127), np.float32))
    with pytest.raises(CodecError, match="-1, 0 or"):
        codec.pack(Ternary(np.full((1, 128), 2, np.int8), np.ones(1, np.float32)))


def test_group_scales_merge_only_if_equal(engine):
    codec = polyquant.codec("i2_s.x86")
    codes = np.ones((2, 256), np.int8)
    codes[0, 128:] = 0
    scale = np.float32([[0.5, 0], [0.5, 0.5]])  # the group of zeros has scale 0, as TQ2_0 writes it
    assert codec.unpack(codec.pack(Ternary(codes, scale)), (2, 256)).scale == 0.5
    with pytest.raises(CodecError, match="one scale per tensor"):
        codec.pack(Ternary(codes, scale * np.float32([[1], [2]])))


@pytest.mark.parametrize(
    ("counts", "zero"),
    [
        ((300_000, 400_000, 299_000, 0), 1),
        ((420_000, 290_000, 290_500, 12), 0),
        ((400_000, 299_500, 300_000, 0), 0),
        ((333_000, 333_300, 333_100, 0), None),
        ((100, 200, 300, 0), None),
        ((0, 0, 0, 0), None),
        ((0, 4096, 0, 0), 1),
    ],
)
def test_which_symbol_is_zero(counts, zero):
    assert likely_zero_symbol(np.array(counts, np.uint64)) == zero
