"""Kernels of codes with tables against the numpy reference: every kind, scale, group and instruction set."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from polyquant.ops import grouped, native
from polyquant.ops.grouped import FLOAT_KINDS, Grouped, Kind
from polyquant.ops.matmul import ROUNDING_CODES, Group, round_activations, round_to_bfloat16
from polyquant.types import Rounding

needs_native = pytest.mark.skipif(not native.available(), reason="no native kernels here")
ROUNDINGS: tuple[Rounding, ...] = ("none", "block", "token", "wide")
KINDS: tuple[Kind, ...] = ("2", "3", "4", "5", "6", "8", "e2m1", "e4m3", "e5m2")
SCALES = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16, "e8m0": np.uint8,
          "e4m3": ml_dtypes.float8_e4m3fn}  # fmt: skip


def width(kind: Kind) -> int:
    return {"e2m1": 4, "e4m3": 8, "e5m2": 8}.get(kind) or int(kind)


def sample(
    kind: Kind, rows: int, k: int, group: int, *, dtype: str = "f16", offset: str = "", pad: int = 0, tall: int = 1
) -> Grouped:
    """A weight of random codes. offset: "zero", "bias" or "" for a common zero point."""
    rng = np.random.default_rng(rows * k + group)
    codes = rng.integers(0, 256, (rows, k * width(kind) // 8 + pad)).astype(np.uint8)
    if kind in FLOAT_KINDS:
        codes &= 0xBB  # finite in both
    cells = -(-rows // tall), -(-k // group)
    scale: Any = rng.uniform(0.25, 1.0, cells).astype(SCALES[dtype])
    if dtype == "e8m0":
        scale = rng.integers(0 if kind == "e2m1" else 120, 131, cells).astype(np.uint8)
    zero = rng.integers(0, 2 ** width(kind), cells).astype(np.uint8) if offset == "zero" else None
    bias = (-rng.uniform(0, 2 ** (width(kind) - 1), cells)).astype(SCALES[dtype]) if offset == "bias" else None
    integers = kind.isdecimal()
    common = 2 ** (width(kind) - 1) if integers and not offset else 0
    return Grouped(codes, kind, (rows, k), scale, group, zero, bias, common, tall, 1.0 if integers else 0.75)


def check(weight: Grouped, tokens: tuple[int, ...] = (1, 2, 3, 4, 5, 9), roundings: Any = ROUNDINGS) -> None:
    rows, k = weight.shape
    handle = grouped.handle(weight)
    assert handle is not None
    rng = np.random.default_rng(k)
    w = grouped.dequantize(weight).astype(np.float64)
    plain = grouped.dequantize(replace(weight, zero=None, bias=None, common=0)).astype(np.float64)
    size = np.abs(plain) + np.abs(w - plain)  # codes and offsets are multiplied apart
    for count in tokens:
        x = (3 * rng.standard_normal((count, k))).astype(np.float32)
        for rounding in roundings:
            (y,) = Group([handle], [rows])(x, rounding)
            seen = (round_to_bfloat16 if weight.kind in FLOAT_KINDS else round_activations)(x, rounding)
            bound = np.abs(seen).astype(np.float64) @ size.T
            want = seen.astype(np.float64) @ w.T
            assert (np.abs(y - want) <= 2e-6 * bound + 1e-30).all(), (weight.kind, weight.shape, count, rounding)


@needs_native
@pytest.mark.parametrize("kind", KINDS)
def test_kernel_equals_reference(kind: Kind, kernels: str) -> None:
    for rows, k, group in ((12, 512, 32), (20, 768, 64), (9, 2304, 128), (8, 256, 256), (5, 480, 16), (3, 96, 48)):
        for dtype, offset in (("f32", "zero"), ("f16", "bias"), ("bf16", "")):
            if kind.isdecimal() or not offset:
                check(sample(kind, rows, k, group, dtype=dtype, offset=offset, pad=k % 3), (1, 3, 5))
    for k in (8, 40, 264, 1032):  # a scale per row
        check(sample(kind, 11, k, k, pad=3), (1, 2, 4, 9), ("none", "block"))


@needs_native
@pytest.mark.parametrize(("kind", "dtype", "group"), [
    ("e2m1", "e8m0", 32), ("e2m1", "e4m3", 16), ("e4m3", "e8m0", 32), ("e5m2", "e8m0", 32), ("e4m3", "f32", 512),
    ("e5m2", "bf16", 512),
])  # fmt: skip
def test_small_floats(kind: Kind, dtype: str, group: int, kernels: str) -> None:
    for rows, k in ((12, 512), (7, 1056 if group < 512 else 1000)):
        check(sample(kind, rows, k, min(group, k), dtype=dtype))


@needs_native
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in FLOAT_KINDS])
def test_many_tokens(kind: Kind, kernels: str) -> None:
    """Tiles of signed bytes do not hold every code as it is stored: offsets, and zero points that are none."""
    offsets = ("zero", "bias", "") if kind.isdecimal() else ("",)
    weights = [sample(kind, 20, 768, 64, offset=offset) for offset in offsets]
    for weight in (*weights, replace(weights[-1], common=0)):
        check(weight, (9, 16, 17), ("block", "wide"))


@needs_native
@pytest.mark.parametrize("group", [32, 64, 96, 192, 4200])
def test_small_floats_of_any_shape(group: int, kernels: str) -> None:
    """Parts of panels, blocks and steps; lines of 4096 bytes; one tile of tokens and several."""
    for rows, k, pad in ((1, 40, 0), (15, 328, 0), (16, 4096, 0), (17, 4096, 64), (33, 600, 1), (40, 256, 0)):
        for kind in FLOAT_KINDS:
            check(sample(kind, rows, k, min(group, k), pad=pad), (1, 2, 3, 4, 5, 12, 13, 30), ("block",))


@needs_native
def test_lines_of_4096_bytes_are_copied(kernels: str) -> None:
    check(sample("4", 20, 8192, 128), (5, 9), ("block",))
    check(sample("8", 20, 4096, 64, offset="zero"), (5, 9), ("block", "wide"))


@needs_native
@pytest.mark.parametrize("tall", [128, 300])
def test_blocks_of_rows_share_scales(tall: int, kernels: str) -> None:
    check(sample("e4m3", 300, 328, 128, dtype="bf16", tall=tall), (1, 2, 6), ("block",))
    check(sample("4", 300, 384, 128, tall=tall, offset="zero"), (1, 2, 6), ("block",))


@needs_native
@pytest.mark.parametrize(("kind", "dtype"), [("e4m3", ml_dtypes.float8_e4m3fn), ("e5m2", ml_dtypes.float8_e5m2)])
@pytest.mark.parametrize("group", [32, 72])
def test_special_numbers(kind: Kind, dtype: Any, group: int, kernels: str) -> None:
    """All 256 bytes: subnormals are exact, infinities and NaN stay; inputs of any size."""
    every = np.arange(256, dtype=np.uint8)[:, None]
    values = every[:, 0].view(dtype).astype(np.float32)
    for column in (5, 70):  # the last ones are multiplied number by number
        codes = np.repeat(every, 72, 1) * np.eye(72, dtype=np.uint8)[column]
        scale = np.ones((256, -(-72 // group)), np.float32)
        groups = Group([grouped.handle(Grouped(codes, kind, (256, 72), scale, group))], [256])
        for tokens, size in ((1, 1.0), (2, 2.0**-90), (3, 2.0**40), (7, 1.0)):
            x = np.zeros((tokens, 72), np.float32)
            x[:, column] = size
            finite = np.isfinite(values)
            (y,) = groups(x, "block")
            want = np.tile(values * np.float32(size), (tokens, 1))
            np.testing.assert_array_equal(y[:, finite], want[:, finite])
            assert not np.isfinite(y[:, ~finite]).any()
            np.testing.assert_array_equal(np.isnan(y[:, np.isnan(values)]), True)


@needs_native
@pytest.mark.parametrize("kind", KINDS)
def test_dequantized_rows_are_exact(kind: Kind, kernels: str) -> None:
    """The float path multiplies the reference's weights: a product with a unit vector returns their bits."""
    for offset in ("zero", "bias", "") if kind.isdecimal() else ("",):
        weight = sample(kind, 6, 272, 16, offset=offset)
        x = np.eye(272, dtype=np.float32)
        (y,) = Group([grouped.handle(weight)], [6])(x, "none")
        want = grouped.dequantize(weight)
        np.testing.assert_allclose(y.T, want, rtol=2e-7 if weight.factor != 1.0 else 0)


@needs_native
@pytest.mark.parametrize("kind", KINDS)
def test_results_of_five_and_more_tokens_are_the_same_bits(kind: Kind, kernels: str) -> None:
    group = Group([grouped.handle(sample(kind, 20, 768, 64))], [20])
    x = (3 * np.random.default_rng(11).standard_normal((24, 768))).astype(np.float32)
    for rounding in ("block", "token"):
        many = group(x, rounding)[0]
        for tokens in (5, 8, 9, 13, 16, 17):
            np.testing.assert_array_equal(group(x[:tokens], rounding)[0], many[:tokens], err_msg=f"{tokens} {rounding}")


@needs_native
def test_experts_use_the_tables_of_their_rows(kernels: str) -> None:
    experts, n, k = 3, 16, 256
    rng = np.random.default_rng(2)
    for weight in (sample("4", experts * n, k, 64, offset="bias"), sample("e4m3", experts * n, k, 128, tall=8)):
        stack = native.module().PackedExperts([grouped.handle(weight)], experts)
        w = grouped.dequantize(weight).reshape(experts, n, k)
        ids = np.array([2, 0, 1, 1, 2, 1, 1, 1, *[0] * 20], np.int32)
        x = rng.standard_normal((len(ids), k)).astype(np.float32)
        y = np.empty((len(ids), n), np.float32)
        round_inputs = round_to_bfloat16 if weight.kind in FLOAT_KINDS else round_activations
        for rounding in ROUNDINGS[:2]:
            stack.multiply(x, ids, ROUNDING_CODES[rounding], y)
            want = np.einsum("tk,tnk->tn", round_inputs(x, rounding), w[ids])
            np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-3)


@needs_native
def test_threads_do_not_change_results() -> None:
    group = Group([grouped.handle(sample("4", 600, 512, 32))], [600])
    x = np.random.default_rng(9).standard_normal((3, 512)).astype(np.float32)
    before = native.threads()
    try:
        native.set_threads(1)
        want = group(x, "block")[0]
        native.set_threads(3)
        for _ in range(20):
            np.testing.assert_array_equal(group(x, "block")[0], want)
    finally:
        native.set_threads(before)


@pytest.mark.parametrize("engine", ["native", "numpy"])
def test_codes_along_the_outputs_become_rows(engine: Any) -> None:
    if engine == "native" and not native.available():
        pytest.skip("no native kernels here")
    rng = np.random.default_rng(4)
    with native.engine(engine):
        for rows, cols in ((1, 1), (33, 70), (16, 16), (0, 3)):
            words = rng.integers(0, 2**32, (rows, cols), dtype=np.uint32)
            np.testing.assert_array_equal(grouped.transposed_words(words).view(np.uint32), words.T)
        for k, columns in ((8, 1), (136, 11), (256, 8), (24, 17)):
            codes = rng.integers(0, 16, (8 * columns, k), dtype=np.uint32)
            packed = np.zeros((k, columns), np.uint32)
            for i, place in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
                packed |= codes[place::8].T << np.uint32(4 * i)
            rows_of = grouped.awq_rows(packed.view(np.int32))
            np.testing.assert_array_equal(rows_of, codes[:, ::2] | codes[:, 1::2] << 4)


@pytest.mark.parametrize(("kind", "shape", "group", "expected"), [
    ("4", (8, 64), 32, True), ("4", (8, 64), 16, True), ("4", (8, 64), 64, True), ("4", (8, 48), 24, False),
    ("4", (8, 40), 40, True), ("4", (8, 36), 36, False), ("e4m3", (8, 36), 5, True), ("3", (0, 64), 32, False),
    ("4", (8, 64), 0, False), ("4", (8, 8, 64), 32, False),
])  # fmt: skip
def test_layouts_with_kernels(kind: Kind, shape: tuple[int, ...], group: int, expected: bool) -> None:
    assert grouped.runs(kind, shape, group) is expected


def test_reference_values() -> None:
    """Worked by hand: three bits, a group of eight, two rows that share a table row."""
    codes = np.array([[0b10001000, 0b11000110, 0b11111010, 9]] * 2, np.uint8)  # 0, 1, 2, 3, 4, 5, 6, 7
    scale, bias = np.full((1, 1), 0.5, np.float16), np.full((1, 1), -1.0, np.float16)
    weight = Grouped(codes, "3", (2, 8), scale, 8, bias=bias, tall=2)
    np.testing.assert_array_equal(grouped.dequantize(weight), [np.arange(8) * 0.5 - 1] * 2)
    weight = Grouped(codes, "3", (2, 8), scale, 8, common=4, tall=2)
    np.testing.assert_array_equal(grouped.dequantize(weight), [(np.arange(8) - 4) * 0.5] * 2)
    fp4 = Grouped(np.array([[0x10, 0x32, 0x7F, 0x8B]], np.uint8), "e2m1", (1, 8), np.array([[128]], np.uint8), 32)
    np.testing.assert_array_equal(grouped.dequantize(fp4), [[0, 1, 2, 3, -12, 12, -3, 0]])
    x = np.ones((1, 8), np.float32)
    np.testing.assert_allclose(grouped.multiply(x, fp4, "none"), [[3]])


@needs_native
def test_arrays_that_do_not_fit_are_rejected() -> None:
    good = sample("4", 8, 64, 32, offset="zero")
    make = native.module().grouped
    codes, scale, zero = (
        np.ascontiguousarray(a).view(np.uint8).reshape(-1) for a in (good.codes, good.scale, good.zero)
    )
    for change, message in (
        ({"codes": codes[:-1]}, "fewer bytes"), ({"pitch": 31}, "does not divide"), ({"cols": 68}, "does not divide"),
        ({"scale": scale[:-1]}, "per group"), ({"zero": zero[1:]}, "per group"), ({"bias": scale}, "per group"),
        ({"group": 24}, "multiple of 16"), ({"kind": "7"}, "unknown kind"), ({"kind": "4.32"}, "unknown kind"),
        ({"number": "f64"}, "scales must be"), ({"kind": "e2m1"}, "only integer codes"),
        ({"rows": 0}, "does not divide"),
    ):  # fmt: skip
        arguments = {
            "codes": codes, "kind": "4", "rows": 8, "cols": 64, "pitch": 32, "scale": scale, "number": "f16",
            "group": 32, "tall": 1, "zero": zero, "bias": None, "common": 0.0, "factor": 1.0,
        }  # fmt: skip
        with pytest.raises(ValueError, match=message):
            make(**(arguments | change))
