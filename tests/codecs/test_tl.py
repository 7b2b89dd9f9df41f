import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import polyquant
from bitnet_gguf import gguf_tensors
from golden import VECTORS, arrays
from polyquant.codecs.tl import TILES
from polyquant.errors import CodecError
from polyquant.ops import native
from polyquant.testing.codecs import same_floats
from polyquant.types import Ternary

FILES = sorted(p.name for p in (VECTORS / "tl1_tl2").glob("*.npz"))


def load(file):
    z = arrays(f"tl1_tl2/{file}")
    return polyquant.codec(file[:3], tile=(int(z["BM"]), int(z["BK"]), int(z["bm"]))), z


@pytest.mark.parametrize("file", FILES)
def test_encode_and_decode_equal_bitnet_cpp(file, engine):
    codec, z = load(file)
    shape = z["ternary"].shape
    np.testing.assert_array_equal(codec.pack(Ternary(z["ternary"], z["scale"].reshape(1)))["blocks"], z["file_bytes"])
    parts = {"blocks": z["file_bytes"]}
    codes = codec.unpack(parts, shape)
    np.testing.assert_array_equal(codes.codes, z["ternary"])
    assert codes.scale == z["scale"]
    assert codec.specs(shape)["blocks"].nbytes == z["file_bytes"].size
    assert codec.count_undefined(parts, shape) == 0
    expected = z["ternary"] * z["scale"]
    same_floats(codec.dequantize(parts, shape), expected)
    same_floats(codec.dequantize(parts, shape, rows=slice(3, 70)), expected[3:70])
    out = np.empty(shape, np.float32)
    assert codec.dequantize(parts, shape, out=out) is out
    same_floats(out, expected)
    np.testing.assert_array_equal(codec.pack(codec.quantize(expected))["blocks"], z["file_bytes"])


@pytest.mark.parametrize(("name", "kind", "tile"), [("tl1", 38, (128, 64, 32)), ("tl2", 39, (128, 96, 32))])
def test_files_of_the_official_converter(name, kind, tile, engine):
    """Tensor by tensor the codes of the I2_S file of the same model, whose scales were rounded to bf16."""
    codec, i2_s = polyquant.codec(name, tile=tile), polyquant.codec("i2_s.x86")
    twins = gguf_tensors("tiny-bitnet-b158-i2_s-x86_128.gguf")
    seen = 0
    for tensor, (shape, found, data) in gguf_tensors(f"tiny-bitnet-b158-{name}.gguf").items():
        if found != kind:
            continue
        seen += 1
        blocks = data[: codec.specs(shape)["blocks"].nbytes]
        codes = codec.unpack({"blocks": blocks}, shape)
        _, _, twin = twins[tensor]
        expected = i2_s.unpack({"blocks": twin[: i2_s.specs(shape)["blocks"].nbytes]}, shape)
        np.testing.assert_array_equal(codes.codes, expected.codes)
        assert codes.scale.astype(ml_dtypes.bfloat16) == expected.scale
        np.testing.assert_array_equal(codec.pack(codes)["blocks"], blocks)
    assert seen == 14


@st.composite
def tiled(draw):
    """(codec, shape): every kind of tile, K with and without a part in pairs."""
    name = draw(st.sampled_from(["tl1", "tl2"]))
    if name == "tl1":
        bm = draw(st.sampled_from([32, 64]))
        tile = bm * draw(st.integers(1, 3)), 256 // bm * draw(st.integers(1, 8)), bm
        k = tile[1] * draw(st.integers(1, 4))
    else:
        tile = 32 * draw(st.integers(1, 3)), 96 * draw(st.integers(1, 2)), 32
        k = 32 * draw(st.integers(8, 20))
    return polyquant.codec(name, tile=tile), (tile[0] * draw(st.integers(1, 3)), k)


@settings(max_examples=40, deadline=None)
@given(case=tiled(), seed=st.integers(0, 2**32 - 1))
def test_native_equals_numpy_and_round_trips(case, seed):
    if native.lib() is None:
        pytest.skip("native kernels are not built or switched off")
    codec, shape = case
    rng = np.random.default_rng(seed)
    codes = Ternary(rng.integers(-1, 2, shape, np.int8), np.array([rng.random()], np.float32))
    noise = {"blocks": rng.integers(0, 256, codec.specs(shape)["blocks"].shape, np.uint8)}
    packed, decoded = [], []
    for which in ("native", "numpy"):
        with native.engine(which):
            packed.append(codec.pack(codes)["blocks"].tobytes())
            decoded.append(codec.unpack(noise, shape).codes.tobytes())
            back = codec.unpack(codec.pack(codes), shape)
            np.testing.assert_array_equal(back.codes, codes.codes)
            assert back.scale == codes.scale
    assert packed[0] == packed[1]
    assert decoded[0] == decoded[1]


def test_undefined_nibbles_are_counted_and_read_as_zeros(engine):
    codec = polyquant.codec("tl1", tile=(32, 8, 32))
    blocks = codec.pack(Ternary(np.ones((32, 8), np.int8), np.ones(1, np.float32)))["blocks"]
    blocks[0] = 0xF8
    parts = {"blocks": blocks}
    assert codec.count_undefined(parts, (32, 8)) == 1
    np.testing.assert_array_equal(codec.unpack(parts, (32, 8)).codes[0], [0, 0, 1, 1, 1, 1, 1, 1])
    codec = polyquant.codec("tl2", tile=(32, 96, 32))
    parts = {"blocks": np.full(codec.specs((32, 256))["blocks"].shape, 0xEE, np.uint8)}
    assert codec.count_undefined(parts, (32, 256)) == 32 * 192 // 3 + 32 * 64 // 2
    assert not codec.unpack(parts, (32, 256)).codes.any()


@pytest.mark.parametrize("second", [False, True])
def test_tiles_of_known_models_fit(second, engine):
    codec = polyquant.codec("tl2" if second else "tl1")
    for shape, tiles in TILES.items():
        assert codec.fit(shape)[0] == tiles[second]
    shape = (1536, 1536)
    codes = Ternary(np.random.default_rng(3).integers(-1, 2, shape, np.int8), np.ones(1, np.float32))
    np.testing.assert_array_equal(codec.unpack(codec.pack(codes), shape).codes, codes.codes)


@pytest.mark.parametrize(
    ("name", "shape", "options", "message"),
    [
        ("tl1", (256, 512), {}, "pass tile="),
        ("tl2", (256, 512), {}, "pass tile="),
        ("tl1", (256, 512), {"tile": (100, 64, 32)}, "tile does not fit"),
        ("tl1", (256, 512), {"tile": (128, 96, 32)}, "tile does not fit"),
        ("tl1", (256, 512), {"tile": (128, 64, 16)}, "tile does not fit"),
        ("tl2", (256, 512), {"tile": (128, 96, 64)}, "tile does not fit"),
        ("tl2", (256, 512), {"tile": (128, 64, 32)}, "tile does not fit"),
        ("tl2", (256, 512), {"tile": (128, 960, 32)}, "tile does not fit"),
        ("tl1", (33, 512), {}, "rows % 32"),
        ("tl2", (32, 128), {}, "K >= 256"),
    ],
)
def test_mismatched_parts_are_reported(name, shape, options, message, engine):
    codec = polyquant.codec(name, **options)
    with pytest.raises(CodecError, match=message):
        codec.pack(Ternary(np.zeros(shape, np.int8), np.ones(1, np.float32)))


def test_mismatched_arrays(engine):
    codec = polyquant.codec("tl1", tile=(32, 8, 32))
    with pytest.raises(CodecError, match="do not fit"):
        codec.unpack({"blocks": np.zeros(5, np.uint8)}, (32, 8))
    with pytest.raises(CodecError, match="-1, 0 or"):
        codec.pack(Ternary(np.full((32, 8), 3, np.int8), np.ones(1, np.float32)))
    for tile in [(0, 8, 32), (32, 8)]:
        with pytest.raises(CodecError, match="three positive"):
            polyquant.codec("tl1", tile=tile)
