"""Packed kernels against the numpy reference: every codec with a kernel, every rounding, any shapes."""

from __future__ import annotations

import numpy as np
import pytest

import polyquant as pq
from polyquant.ops import native
from polyquant.ops.matmul import Group, round_activations
from polyquant.registry import CODECS
from polyquant.types import Floats, Parts, Rounding, Ternary

pytestmark = pytest.mark.skipif(not native.available(), reason="no native kernels here")

ROUNDINGS: tuple[Rounding, ...] = ("none", "block", "token", "wide")
WITHOUT = {
    "f64",
    "i8",
    "i16",
    "i32",
    "i64",
    "u8",
    "u16",
    "u32",
    "u64",
    "bool",
    "f8_e4m3",
    "f8_e5m2",
    "tl1",
    "tl2",
    "hf_mxfp8",  # leaves inputs as floats: tests/ops/test_grouped.py
}
NAMES = [
    n for n in CODECS if n not in WITHOUT and not n.startswith(("trellis", "exl3", "metal_marlin"))
]  # the others have separate tests


def packed_weight(name: str, rows: int, k: int, rng: np.random.Generator) -> Parts:
    codec = pq.codec(name)
    if codec.form is Ternary and not name.startswith("tq") and name != "trinity.tq2_0":
        codes = rng.integers(-1, 2, (rows, k)).astype(np.int8)
        return codec.pack(Ternary(codes, np.array([1 if name == "trinity.i2_s" else 0.0123], np.float32)))
    try:
        return codec.pack(codec.quantize(rng.standard_normal((rows, k)).astype(np.float32)))
    except pq.PolyquantError:  # a type that is only read: any bytes are legal, scales of infinity are left out below
        spec = codec.specs((rows, k))["blocks"]
        return {"blocks": rng.integers(0, 256, spec.shape).astype(np.uint8)}


def shapes(name: str) -> list[tuple[int, int]]:
    column = pq.codec(name).granule[1]
    found = [(12, 512), (20, 2304), (8, 256)]
    return found if column > 128 else [*found, (16, 384), (12, 128)]


@pytest.mark.parametrize("name", NAMES)
def test_kernel_equals_reference(name: str, kernels: str) -> None:
    rng = np.random.default_rng(7)
    codec = pq.codec(name)
    for rows, k in shapes(name):
        parts = packed_weight(name, rows, k, rng)
        handle = codec.packed(parts, (rows, k))
        assert handle is not None
        w = codec.dequantize(parts, (rows, k)).astype(np.float64)
        sound = np.isfinite(w).all(1) & (np.abs(w).max(1) < 1e30)
        assert sound.any()
        for tokens in (1, 2, 3, 4, 5, 9):
            x = (3 * rng.standard_normal((tokens, k))).astype(np.float32)
            for rounding in ROUNDINGS:
                (y,) = Group([handle], [rows])(x, rounding)
                seen = x if codec.form is Floats else round_activations(x, rounding)
                want = seen.astype(np.float64) @ w.T
                bound = np.abs(seen).astype(np.float64) @ np.abs(w.T)
                assert (np.abs(y - want)[:, sound] <= 3e-6 * bound[:, sound] + 1e-30).all(), (rows, k, tokens, rounding)


@pytest.mark.parametrize("name", ["q4_0", "q6_k", "iq4_xs", "tq2_0", "i2_s.x86", "hf_bitnet.autobitlinear"])
def test_one_token_and_many_give_equal_results(name: str) -> None:
    rng = np.random.default_rng(3)
    codec, rows, k = pq.codec(name), 24, 1024
    group = Group([codec.packed(packed_weight(name, rows, k, rng), (rows, k))], [rows])
    x = rng.standard_normal((13, k)).astype(np.float32)
    many = group(x, "block")[0]
    for t in range(13):
        np.testing.assert_allclose(
            group(x[t : t + 1], "block")[0][0], many[t], rtol=2e-5, atol=2e-5 * np.abs(many).max()
        )


@pytest.mark.parametrize("name", NAMES)
def test_results_of_five_and_more_tokens_are_the_same_bits(name: str, kernels: str) -> None:
    """Up to 12, up to 16 and more tokens have different kernels with one order of sums."""
    rng = np.random.default_rng(11)
    codec, rows = pq.codec(name), 20
    k = 736 if 32 % codec.granule[1] == 0 else 768  # the last unit of 256 columns is incomplete
    group = Group([codec.packed(packed_weight(name, rows, k, rng), (rows, k))], [rows])
    x = (3 * rng.standard_normal((24, k))).astype(np.float32)
    for rounding in ROUNDINGS:
        many = group(x, rounding)[0]
        for tokens in (5, 8, 9, 12, 13, 16, 17):
            np.testing.assert_array_equal(group(x[:tokens], rounding)[0], many[:tokens], err_msg=f"{tokens} {rounding}")


@pytest.mark.parametrize("name", NAMES)
def test_results_of_one_to_four_tokens_are_the_same_bits(name: str, kernels: str) -> None:
    rng = np.random.default_rng(13)
    codec, rows, k = pq.codec(name), 20, 768
    group = Group([codec.packed(packed_weight(name, rows, k, rng), (rows, k))], [rows])
    x = (3 * rng.standard_normal((4, k))).astype(np.float32)
    for rounding in ROUNDINGS:
        single = np.concatenate([group(x[i : i + 1], rounding)[0] for i in range(4)])
        for tokens in (2, 3, 4):
            np.testing.assert_array_equal(group(x[:tokens], rounding)[0], single[:tokens], err_msg=rounding)


@pytest.mark.parametrize("name", ["q4_0", "q4_k", "q6_k", "q8_0", "mxfp4", "tq2_0", "hf_bitnet.autobitlinear"])
def test_more_tokens_and_rows_than_fit_the_cache(name: str, kernels: str) -> None:
    """Blocks of tokens pass several panels, the last of which is incomplete."""
    if kernels == "plain":
        pytest.skip("has no panels")
    rng = np.random.default_rng(13)
    codec, rows, k = pq.codec(name), 76, 4096
    parts = packed_weight(name, rows, k, rng)
    group = Group([codec.packed(parts, (rows, k))], [rows])
    x = (3 * rng.standard_normal((70, k))).astype(np.float32)
    w = codec.dequantize(parts, (rows, k)).astype(np.float64)
    for rounding in ("block", "wide"):
        y, seen = group(x, rounding)[0], round_activations(x, rounding).astype(np.float64)
        assert (np.abs(y - seen @ w.T) <= 3e-6 * (np.abs(seen) @ np.abs(w.T))).all()
        for first in range(0, 70, 10):
            np.testing.assert_array_equal(group(x[first : first + 10], rounding)[0], y[first : first + 10])


@pytest.mark.parametrize("name", ["f32", "bf16"])
@pytest.mark.parametrize(("rows", "k"), [(76, 1031), (33, 8), (7, 40), (41, 9000)])
def test_floats_of_any_shape(name: str, rows: int, k: int, kernels: str) -> None:
    """Panels and vectors of tokens may be incomplete; with many columns, fewer rows are multiplied together."""
    rng = np.random.default_rng(17)
    codec = pq.codec(name)
    parts = packed_weight(name, rows, k, rng)
    group = Group([codec.packed(parts, (rows, k))], [rows])
    x = (3 * rng.standard_normal((50, k))).astype(np.float32)
    w = codec.dequantize(parts, (rows, k)).astype(np.float64)
    y, wide = group(x, "none")[0], x.astype(np.float64)
    assert (np.abs(y - wide @ w.T) <= 2e-7 * k**0.5 * (np.abs(wide) @ np.abs(w.T))).all()
    for tokens in (5, 16, 17, 32, 33, 48, 49):
        np.testing.assert_array_equal(group(x[:tokens], "none")[0], y[:tokens], err_msg=str(tokens))


def test_several_matrices_share_an_input() -> None:
    rng = np.random.default_rng(5)
    handles, single = [], []
    x = rng.standard_normal((7, 512)).astype(np.float32)
    for name, rows in (("q4_k", 40), ("q6_k", 12), ("bf16", 9)):
        codec = pq.codec(name)
        handle = codec.packed(packed_weight(name, rows, 512, rng), (rows, 512))
        handles.append((handle, rows))
        single.append(Group([handle], [rows])(x, "block")[0])
    together = Group([h for h, _ in handles], [r for _, r in handles])(x, "block")
    for a, b in zip(together, single, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_do_not_change_results(threads: int) -> None:
    rng = np.random.default_rng(9)
    codec = pq.codec("q4_k")
    group = Group([codec.packed(packed_weight("q4_k", 600, 512, rng), (600, 512))], [600])
    x = rng.standard_normal((3, 512)).astype(np.float32)
    before = native.threads()
    try:
        native.set_threads(1)
        want = group(x, "block")[0]
        native.set_threads(threads)
        assert native.threads() == threads
        for _ in range(50):
            np.testing.assert_array_equal(group(x, "block")[0], want)
    finally:
        native.set_threads(before)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("rounding", ["block", "wide", "token"])
def test_nan_and_infinity_spoil_only_their_token(bad: float, rounding: Rounding, kernels: str) -> None:
    rng = np.random.default_rng(1)
    codec = pq.codec("tq2_0")
    handle = codec.packed(packed_weight("tq2_0", 8, 512, rng), (8, 512))
    for tokens in (2, 6):
        x = rng.standard_normal((tokens, 512)).astype(np.float32)
        x[1, 300] = bad
        (y,) = Group([handle], [8])(x, rounding)
        assert np.isnan(y[1]).all()
        assert np.isfinite(np.delete(y, 1, axis=0)).all()
        assert np.isnan(round_activations(x, rounding)[1]).any()


def test_zeros_stay_zeros() -> None:
    x = np.zeros((2, 160), np.float32)
    for rounding in ROUNDINGS:
        np.testing.assert_array_equal(round_activations(x, rounding), x)


def test_shapes_are_checked() -> None:
    codec = pq.codec("q8_0")
    handle = codec.packed(codec.pack(codec.quantize(np.ones((4, 64), np.float32))), (4, 64))
    with pytest.raises(ValueError, match="shapes of weights, activations and output"):
        Group([handle], [4])(np.ones((1, 32), np.float32), "block")
    with pytest.raises(ValueError, match="fewer bytes"):
        native.module().packed("q8_0", np.zeros(10, np.uint8), 4, 64, 1.0, 0)
    with pytest.raises(ValueError, match="does not divide"):
        native.module().packed("q8_0", np.zeros(1000, np.uint8), 4, 63, 1.0, 0)
