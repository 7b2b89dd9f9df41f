import warnings

import numpy as np
import pytest

import polyquant
from golden import arrays, cases
from polyquant.codecs.iq_codebooks import CODEBOOKS, FILE, SIGNS, codebook
from polyquant.errors import UnsupportedError
from polyquant.ops import native
from polyquant.testing.codecs import check_dequantize, check_sizes, same_floats

GRID = ["iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s"]
WRITTEN = ["iq4_nl", "iq4_xs"]
NAMES = [*GRID, *WRITTEN]


@pytest.mark.parametrize("name", NAMES)
def test_dequantize_equals_ggml(name, engine):
    z = arrays(f"ggml/{name}.npz")
    codec = polyquant.codec(name)
    assert (codec.type_id, codec.block, codec.type_size) == (z["type_id"], z["block_size"], z["type_size"])
    found = cases(z)
    assert {"", "_edge", "_imatrix", "_random"} <= {suffix for suffix, _, _ in found}
    assert name not in GRID or "_allgrid" in {suffix for suffix, _, _ in found}
    for _, packed, expected in found:
        check_dequantize(name, packed, expected)


@pytest.mark.parametrize("name", NAMES)
def test_engines_decode_random_bytes_to_equal_floats(name):
    """Any byte is legal: indices cannot leave their tables, infinite and NaN scales pass in silence."""
    codec = polyquant.codec(name)
    blocks = np.random.default_rng(3).integers(0, 256, (5, 400 * codec.type_size), np.uint8)
    blocks[0] = 255
    shape = (5, 400 * codec.block)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with native.engine("numpy"):
            expected = codec.dequantize({"blocks": blocks}, shape)
        same_floats(codec.dequantize({"blocks": blocks}, shape), expected)


@pytest.mark.parametrize("name", NAMES)
def test_fields_are_inside_the_block(name):
    codec = polyquant.codec(name)
    ends = [offset + size * count for offset, size, count in codec.fields]
    assert all(end <= codec.type_size for end in ends)
    assert name == "iq1_m" or codec.fields[0][0] == 0


@pytest.mark.parametrize("name", GRID)
def test_grid_types_are_read_only(name):
    with pytest.raises(UnsupportedError, match="is read-only"):
        polyquant.codec(name).quantize(np.zeros((1, 256), np.float32))


def error(name, w, importance=None):
    """Relative root mean square error of a round trip, weighted by importance."""
    codec = polyquant.codec(name)
    parts = codec.pack(codec.quantize(w, importance=importance))
    return relative(w, codec.dequantize(parts, w.shape), importance)


def relative(w, again, importance=None):
    weight = 1 if importance is None else importance.astype(np.float64)
    return np.sqrt((weight * (w.astype(np.float64) - again) ** 2).sum() / (weight * w.astype(np.float64) ** 2).sum())


@pytest.mark.parametrize("name", WRITTEN)
def test_quantize_error_is_at_most_that_of_ggml(name, engine):
    z = arrays(f"ggml/{name}.npz")
    assert error(name, z["source"]) <= relative(z["source"], z["dequant"])
    assert error(name, z["source_edge"]) <= relative(z["source_edge"], z["dequant_edge"])
    weighted = error(name, z["source"], z["imatrix"])
    assert weighted <= relative(z["source"], z["dequant_imatrix"], z["imatrix"])
    assert weighted < relative(z["source"], z["dequant"], z["imatrix"])


@pytest.mark.parametrize(("name", "gauss", "student"), [("iq4_nl", 0.0759, 0.0936), ("iq4_xs", 0.0765, 0.0945)])
def test_quantize_error_is_below_the_limits(name, gauss, student):
    rng = np.random.default_rng(0)
    assert error(name, rng.standard_normal((64, 4096)).astype(np.float32)) < gauss
    assert error(name, rng.standard_t(4, (64, 4096)).astype(np.float32)) < student


@pytest.mark.parametrize("name", WRITTEN)
def test_quantize_native_equals_numpy(name):
    rng = np.random.default_rng(5)
    codec = polyquant.codec(name)
    scales = np.float32(10.0) ** rng.integers(-42, 38, (64, 1)).astype(np.float32)
    for scale in (np.float32(1), scales):
        w = (rng.standard_normal((64, 1024)) * scale).astype(np.float32)
        w[:, 256:600] = 0
        w[:, ::7] = 0
        for importance in (None, rng.random(1024).astype(np.float32), np.zeros(1024, np.float32)):
            with native.engine("numpy"):
                expected = codec.quantize(w, importance=importance).blocks
            np.testing.assert_array_equal(codec.quantize(w, importance=importance).blocks, expected)


@pytest.mark.parametrize("name", WRITTEN)
def test_quantize_accepts_floats_of_every_magnitude(name, engine):
    w = np.random.default_rng(7).integers(0, 1 << 32, (16, 512), np.uint32).view(np.float32)
    w = np.where(np.isfinite(w), w, np.float32(0))  # of every size; NaN and infinity are refused
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert polyquant.codec(name).quantize(w).blocks.shape == (16, 512 // 256 * {"iq4_nl": 144, "iq4_xs": 136}[name])


@pytest.mark.parametrize("name", WRITTEN)
def test_sizes(name, engine):
    check_sizes(name)


@pytest.mark.parametrize("name", CODEBOOKS)
def test_codebook_is_strictly_ascending(name):
    book = CODEBOOKS[name]
    digits = np.searchsorted(book.levels, codebook(name))
    packed = (digits << (book.bits * np.arange(book.width))).sum(axis=1)
    assert len(packed) == book.entries
    assert (np.diff(packed) > 0).all()
    if name.startswith("iq2") or name == "iq3_xxs":
        assert (digits.sum(axis=1) % 2 == 0).all()


def test_codebook_file_contains_exactly_the_tables():
    assert FILE.stat().st_size == 2 * sum(book.entries for book in CODEBOOKS.values())


def test_codebooks_equal_gguf_py():
    quants = pytest.importorskip("gguf.quants")
    for name in CODEBOOKS:
        peer = getattr(quants, "IQ1_S" if name == "iq1" else name.upper())
        peer.init_grid()
        np.testing.assert_array_equal(codebook(name), peer.grid.reshape(codebook(name).shape))
    assert SIGNS.tobytes() == quants.IQ2_XXS.ksigns
