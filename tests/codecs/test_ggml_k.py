import numpy as np
import pytest

import polyquant
from golden import arrays, cases
from polyquant.ops import native
from polyquant.testing.codecs import check_dequantize, check_quantize_bytes, check_sizes, same_floats

NAMES = ["q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "q8_k"]
SEARCHED = NAMES[:5]
# relative RMSE of llama.cpp's own quantizers on Gaussian and Student-t(4) weights
GGML_ERROR = {
    "q2_k": (0.2961, 0.3431),
    "q3_k": (0.1507, 0.1838),
    "q4_k": (0.0713, 0.0865),
    "q5_k": (0.0361, 0.0438),
    "q6_k": (0.0177, 0.0229),
}


def decoded(name, w, importance=None):
    codec = polyquant.codec(name)
    return codec.dequantize(codec.pack(codec.quantize(w, importance=importance)), w.shape)


def both_engines(run):
    if native.lib() is None:
        pytest.skip("native kernels are not built or switched off")
    found = []
    for which in ("native", "numpy"):
        with native.engine(which):
            found.append(run())
    return found


def error(w, other, importance=1.0):
    """Squared error of each row."""
    return (importance * (w.astype(np.float64) - other) ** 2).sum(axis=1)


@pytest.mark.parametrize("name", NAMES)
def test_dequantize_equals_ggml(name, engine):
    for _, packed, expected in cases(arrays(f"ggml/{name}.npz")):
        check_dequantize(name, packed, expected)


@pytest.mark.parametrize("name", NAMES)
def test_engines_decode_any_bytes_to_equal_floats(name):
    codec = polyquant.codec(name)
    packed = np.random.default_rng(3).integers(0, 256, (64, 2 * codec.type_size), np.uint8)
    same_floats(*both_engines(lambda: codec.dequantize({"blocks": packed}, (64, 512))))


@pytest.mark.parametrize("name", NAMES)
def test_sizes(name, engine):
    check_sizes(name)


def test_q8_k_gives_ggml_bytes(engine):
    z = arrays("ggml/q8_k.npz")
    check_quantize_bytes("q8_k", z["source"], z["packed"])
    check_quantize_bytes("q8_k", z["source_edge"], z["packed_edge"])


@pytest.mark.parametrize("name", SEARCHED)
@pytest.mark.parametrize("case", ["", "_edge", "_imatrix"])
def test_no_row_is_worse_than_ggml(name, case, engine):
    z = arrays(f"ggml/{name}.npz")
    w = z["source_edge" if case == "_edge" else "source"]
    importance = z["imatrix"] if case == "_imatrix" else None
    weight = 1.0 if importance is None else importance
    ours, theirs = error(w, decoded(name, w, importance), weight), error(w, z[f"dequant{case}"], weight)
    assert (ours <= theirs).all(), ours / theirs
    assert ours.sum() < 0.95 * theirs.sum()


@pytest.mark.parametrize("name", SEARCHED)
def test_error_on_random_weights_stays_below_ggml(name, engine):
    rng = np.random.default_rng(0)
    for w, bar in zip((rng.standard_normal((64, 4096)), rng.standard_t(4, (64, 4096))), GGML_ERROR[name], strict=True):
        w = w.astype(np.float32)
        assert np.sqrt(error(w, decoded(name, w)).sum() / np.square(w, dtype=np.float64).sum()) < 0.985 * bar


def awkward(rng):
    """Return rows [24, 768] for every branch: extreme scales, ties, constants, sparse, one-sided, ternary."""
    w = rng.standard_normal((24, 768)).astype(np.float32)
    w[:8] *= np.float32(10.0) ** np.array([-40, -30, -8, -6, -4, 2, 8, 30], np.float32)[:, None]
    w[8], w[9], w[10] = 0, 0.7, -1.3
    w[11] = np.abs(w[11]) + 3
    w[12] = -np.abs(w[12]) - 3
    w[13] = np.round(w[13])
    w[14] = np.sign(w[14]) * 0.3
    w[15] *= rng.random(768) < 0.02
    w[16] = rng.integers(-1, 2, 768) * np.float32(0.0417)
    w[17] = np.linspace(-2, 5, 768)
    w[18] = rng.standard_t(2, 768)
    w[19, ::32] *= 50
    w[20] += 2
    w[21, :256], w[21, 256:512] = 0, 1
    w[22] = np.repeat(w[22, :48], 16)
    w[23] = np.where(np.arange(768) % 2, np.float32(0.125), np.float32(-0.125))
    return w


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("weighted", [False, True])
def test_engines_quantize_to_equal_bytes(name, weighted):
    rng = np.random.default_rng(11)
    w = np.concatenate([awkward(rng), rng.standard_normal((41, 768)).astype(np.float32)])
    importance = rng.gamma(0.3, size=768).astype(np.float32) if weighted else None
    codec = polyquant.codec(name)
    one, other = both_engines(lambda: codec.quantize(w, importance=importance).blocks)
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", NAMES)
def test_quantize_accepts_floats_of_every_magnitude(name):
    rng = np.random.default_rng(5)
    w = rng.integers(0, 2**32, (16, 512), np.uint32).view(np.float32)
    w = np.where(np.isfinite(w), w, np.float32(0))  # of every size; NaN and infinity are refused
    strange = np.nan_to_num(
        np.abs(rng.integers(0, 2**32, 512, np.uint32).view(np.float32))
    )  # of every size; NaN is refused
    codec = polyquant.codec(name)
    for importance in (None, strange, np.zeros(512, np.float32)):
        one, other = both_engines(lambda i=importance: codec.quantize(w, importance=i).blocks)
        np.testing.assert_array_equal(one, other)
        if name != "q8_k":
            assert np.isfinite(codec.dequantize({"blocks": one}, w.shape)).all()


@pytest.mark.parametrize("name", ["q2_k", "q4_k", "q5_k"])
def test_one_sided_rows_have_the_error_of_their_negation(name, engine):
    """ggml's minima only reach below zero: a row far above zero would waste its codes on the range down to zero."""
    w = np.random.default_rng(2).uniform(5, 6, (4, 1024)).astype(np.float32)
    above, below = error(w, decoded(name, w)), error(-w, decoded(name, -w))
    np.testing.assert_array_equal(above, below)
    assert above.sum() / w.size < 0.01 * w.var() * 4 ** (4 - int(name[1]))


def test_importance_moves_the_error_to_unimportant_columns(engine):
    rng = np.random.default_rng(4)
    w = rng.standard_normal((16, 512)).astype(np.float32)
    importance = np.where(np.arange(512) % 4 == 0, np.float32(100), np.float32(1))
    for name in SEARCHED:
        with_, without = decoded(name, w, importance), decoded(name, w)
        assert error(w, with_, importance).sum() < 0.9 * error(w, without, importance).sum()
