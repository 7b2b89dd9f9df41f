"""Rows of remade tensors from files, and experts of stacks: every codec that is read by rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import polyquant
from polyquant import registry
from polyquant.errors import InputError, UnsupportedError
from polyquant.operations import SAME, AddConstant, Concat, Interleave, Matrix, Rows, Slice, Stack, Transpose, chain
from polyquant.ops import native
from polyquant.ops.metrics import error_sums
from polyquant.rows import expert, experts, float_rows, stored_rows, whole_floats
from polyquant.runtime.linear import Linear
from polyquant.testing.codecs import any_parts
from polyquant.types import ArraySpec, Ternary, Weight, as_matrix

STACK = (3, 8, 512)  # [experts, N, K]


@dataclass
class Held:
    """An in-memory stored array that records reads."""

    array: np.ndarray
    reads: list[tuple[int, int]] = field(default_factory=list)

    @property
    def spec(self) -> ArraySpec:
        return ArraySpec(self.array.shape, self.array.dtype)

    def view(self) -> np.ndarray:
        return self.array

    def read(self, start: int, stop: int) -> np.ndarray:
        self.reads.append((start, stop))
        return self.array[start:stop].copy()


def held(name, w, codec="f32"):
    found = polyquant.codec(codec)
    parts = found.pack(found.quantize(w))
    return Weight(name, w.shape, found, {k: Held(v) for k, v in parts.items()})


def row_sliced():
    """Every built-in codec that is read by rows and can be written."""
    names = []
    for name in (*registry.CODECS, "w8a16", "w8a16.g32", "w8a8.dynamic", "w4a16.g32"):
        found = polyquant.codec(name)
        if found.row_sliced:
            names.append(name)
    return names


def stack_of(codec, shape=STACK):
    """A stack in that codec; of ternary values for those that hold no others, of integers for integer types."""
    rng = np.random.default_rng(0)
    w = rng.standard_normal(shape).astype(np.float32)
    if codec.startswith(("i", "u", "bool")) and not codec.startswith("iq"):
        w = rng.integers(0, 2, shape).astype(np.float32)
    try:
        return held("stack", w, codec)
    except UnsupportedError as refused:
        found = polyquant.codec(codec)
        if "is read-only" not in str(refused):
            raise
        parts = {k: Held(rng.integers(0, 16, s.shape).astype(s.dtype)) for k, s in found.specs(shape).items()}
        return Weight("stack", shape, found, parts)


@pytest.mark.parametrize("codec", [n for n in row_sliced() if not n.startswith("w")])
def test_an_expert_is_a_separate_matrix(codec):
    stack = stack_of(codec)
    whole = stack.dequantize()
    assert whole.shape == STACK
    for i, one in enumerate(experts(stack)):
        assert one.shape == STACK[1:] and one.codec is stack.codec
        np.testing.assert_array_equal(one.dequantize(), whole[i])
        np.testing.assert_array_equal(one.dequantize(rows=slice(2, 5)), whole[i, 2:5])
        read = one.read(slice(2, 5))
        np.testing.assert_array_equal(one.codec.dequantize(read, (3, STACK[2])), whole[i, 2:5])
        assert 3 * one.nbytes == stack.nbytes and one.bpw == stack.bpw
        for part, array in one.parts.items():
            assert np.shares_memory(array, stack.parts[part])  # nothing is copied
    total = sum(
        (error_sums(whole[i], one.dequantize()) for i, one in enumerate(experts(stack))),
        error_sums(whole[:0], whole[:0]),
    )
    assert total.dd == 0 and total.count == whole.size
    np.testing.assert_array_equal(stack.dequantize(rows=slice(6, 11)), whole.reshape(-1, STACK[2])[6:11])


@pytest.mark.parametrize("codec", ["w8a16", "w8a16.g32", "w8a8.dynamic", "w4a16.g32"])
def test_codecs_of_linear_layers_refuse_stacks(codec):
    with pytest.raises(polyquant.errors.CodecError, match=r"needs a matrix.*\[N, K\]"):
        polyquant.codec(codec).specs(STACK)


@pytest.mark.parametrize("codec", ["f32", "f16", "bf16", "q8_0", "q4_0", "q4_k", "q6_k", "iq4_xs", "mxfp4", "tq2_0"])
def test_an_expert_multiplies_in_its_stored_layout(codec):
    stack = stack_of(codec)
    x = np.random.default_rng(1).standard_normal((4, STACK[2])).astype(np.float32)
    for one in experts(stack):
        linear = Linear([one], [None], "none")
        (y,) = linear(x)
        expected = x.astype(np.float64) @ one.dequantize().astype(np.float64).T
        np.testing.assert_allclose(y, expected, rtol=1e-3, atol=1e-3 * np.abs(expected).max())


def test_invalid_experts():
    stack = stack_of("q8_0")
    with pytest.raises(InputError, match="has no matrix 3"):
        expert(stack, 3)
    with pytest.raises(InputError, match=r"expected \[experts, rows, K\]"):
        expert(held("w", np.zeros((4, 32), np.float32)), 0)


def whole_stack(codec, shape, **options):
    """Return a stack of random bytes of its size, with real floats where the layout has floats."""
    found = polyquant.codec(codec, **options)
    rng = np.random.default_rng(0)
    if found.form is Ternary:
        w = rng.integers(-1, 2, shape).astype(np.float32) * np.float32(1 if codec.startswith("trinity") else 0.37)
        parts = found.pack(found.quantize(w))
    else:
        parts = any_parts(found, shape)
    return Weight("stack", shape, found, {k: Held(v) for k, v in parts.items()})


CUTS = [
    ("i2_s.x86", (3, 4, 96), {}),  # blocks of 128 run over rows, not over matrices
    ("i2_s.x86", (2, 2, 4, 128), {}),
    ("i2_s.arm", (5, 2, 96), {}),
    ("i2_s.x4", (3, 8, 5), {}),
    ("trinity.i2_s", (3, 5, 7), {}),  # padded rows
    ("tl1", (3, 64, 128), {"tile": (32, 64, 32)}),
    ("tl1", (3, 128, 64), {"tile": (64, 64, 64)}),
    ("tl1", (4, 1024, 4096), {}),  # as one matrix it has a known model's shape, and so a known tile
    ("tl2", (3, 64, 288), {"tile": (32, 96, 32)}),  # no columns of pairs
    ("tl2", (3, 64, 320), {"tile": (32, 96, 32)}),
    ("tl2", (2, 64, 448), {"tile": (64, 192, 32)}),
    ("trellis.3", (3, 128, 80), {}),
    ("trellis.4", (3, 32, 64), {"hadamard": (16, 32)}),
    ("trellis.3.mul1.14.flat", (3, 48, 300), {}),
    ("trellis.2.grid", (3, 16, 130), {}),
    ("trellis.3.lut.9", (2, 128, 64), {}),
    ("trellis.3", (3, 64, 64), {}),  # an odd number of matrices is rotated in the blocks of one
]


@pytest.mark.parametrize("engine", ["native", "numpy"])
@pytest.mark.parametrize(("codec", "shape", "options"), CUTS)
def test_an_expert_is_sliced_from_parts_of_the_stack(codec, shape, options, engine):
    stack = whole_stack(codec, shape, **options)
    with native.engine(engine):
        whole = stack.dequantize().reshape(-1, *shape[-2:])
        assert np.unique(whole).size > 2
        for i, one in enumerate(experts(stack)):
            assert one.shape == shape[-2:]
            np.testing.assert_array_equal(one.dequantize(), whole[i])
            np.testing.assert_array_equal(one.codec.dequantize(one.read(), one.shape), whole[i])
            assert {k: a.spec for k, a in one.arrays.items()} == one.codec.specs(one.shape)
            for array in one.arrays.values():
                np.testing.assert_array_equal(array.view(), array.read(0, array.spec.shape[0]))
                np.testing.assert_array_equal(array.view()[3:9], array.read(3, min(9, array.spec.shape[0])))


def test_a_slice_reads_only_its_bytes():
    """The matrix and the scale at the end, not the stack; bytes that no piece of TL2 covers are zeros."""
    stack = whole_stack("i2_s.x86", (3, 4, 96))
    expert(stack, 1).read()
    assert stack.arrays["blocks"].reads == [(0, 0), (96, 192), (288, 320)]
    stack = whole_stack("tl2", (3, 64, 320), tile=(32, 96, 32))
    stack.arrays["blocks"].array[-36:-32] = 255  # unused
    one = expert(stack, 2).parts["blocks"]
    assert one[-36:-32].tolist() == [0] * 4 and one[-32:].tolist() == stack.arrays["blocks"].array[-32:].tolist()


def test_a_slice_multiplies_in_its_stored_layout():
    for codec, shape in (("i2_s.x86", (2, 32, 128)), ("trellis.3", (2, 128, 128))):
        stack = whole_stack(codec, shape)
        x = np.random.default_rng(1).standard_normal((3, shape[2])).astype(np.float32)
        for one in experts(stack):
            (y,) = Linear([one], [None], "none")(x)
            expected = x.astype(np.float64) @ one.dequantize().astype(np.float64).T
            np.testing.assert_allclose(y, expected, rtol=1e-3, atol=1e-3 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("codec", "shape", "options", "says"),
    [
        (
            "i2_s.x86",
            (4, 1, 32),
            {},
            r"a block of 128 weights spans two matrices \(found matrices \[1, 32\]\)",
        ),
        ("i2_s.x4", (2, 2, 32), {}, r"a block of 4 rows spans"),
        ("tl1", (2, 32, 64), {"tile": (64, 64, 32)}, r"a tile of 64 rows spans two matrices"),
        ("trellis.3", (2, 24, 32), {}, r"a tile of 16 outputs spans two matrices"),
        ("trellis.3", (2, 64, 32), {}, r"the rotation of 128 outputs spans two matrices"),
        ("hf_bitnet.bitlinear", (2, 4, 32), {}, r"each byte holds weights from all quarters"),
    ],
)
def test_matrices_that_share_bytes_are_refused(codec, shape, options, says):
    """They decode correctly as one matrix, but experts share bytes."""
    stack = whole_stack(codec, shape, **options)
    assert stack.dequantize().shape == shape
    with pytest.raises(UnsupportedError, match=rf"^stack: .*{codec} .*cannot be split.*{says}.*convert it"):
        expert(stack, 0)


def test_a_stack_whose_tile_is_unknown():
    stack = whole_stack("tl1", (2, 64, 64), tile=(32, 64, 32))
    with pytest.raises(UnsupportedError, match=r"its tile is not in the file.*pass tile="):
        expert(Weight("stack", stack.shape, polyquant.codec("tl1"), stack.arrays), 0)


def test_one_scale_cannot_hold_experts_of_several():
    found = polyquant.codec("i2_s.x86")
    w = np.ones((2, 128, 128), np.float32)
    w[1] *= 2
    with pytest.raises(polyquant.errors.CodecError, match="needs ternary weights"):
        found.quantize(w)


# ---------------------------------------------------------------- blocks of remade tensors


CASES = [
    (SAME, 1),
    (Rows(np.arange(24) * 7 % 24), 1),
    (Slice(5, 19), 1),
    (Slice(1, 24, 2), 1),
    (Concat(), 3),
    (Stack(), 3),
    (Interleave(), 2),
    (chain(Concat(), Rows(np.arange(48) * 7 % 48)), 2),
    (chain(Slice(4, 20), Transpose()), 1),
    (Concat(1), 2),
    (AddConstant(1.0), 1),
    (chain(Stack(), Transpose()), 2),
    (chain(Stack(), Matrix(1)), 2),
]


@pytest.mark.parametrize("codec", ["f32", "bf16", "q8_0", "q4_k", "tq1_0"])
@pytest.mark.parametrize(("op", "count"), CASES, ids=lambda x: type(x).__name__)
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_blocks_are_rows_of_the_reference(codec, op, count, size):
    rng = np.random.default_rng(0)
    weights = [held(f"w{i}", rng.standard_normal((24, 256)).astype(np.float32), codec) for i in range(count)]
    expected = op.reference([w.dequantize() for w in weights])
    rows, k = as_matrix(expected.shape)
    np.testing.assert_array_equal(whole_floats(weights, op), expected)
    parts = [slice(a, min(rows, a + size)) for a in range(0, rows, size)]
    found = np.concatenate([float_rows(weights, op, p) for p in parts])
    np.testing.assert_array_equal(found, expected.reshape(rows, k))
    if op.keeps_rows([w.shape for w in weights]):
        stored = np.concatenate([stored_rows(weights, op, p)["blocks"] for p in parts])
        np.testing.assert_array_equal(weights[0].codec.dequantize({"blocks": stored}, (rows, k)), found)


def test_sources_that_are_read_whole_give_rows_too():
    rng = np.random.default_rng(0)
    values = [rng.integers(-1, 2, (128, 128)).astype(np.float32) * np.float32(s) for s in (0.5, 2)]
    weights = [held(f"w{i}", w, "i2_s.x86") for i, w in enumerate(values)]
    np.testing.assert_array_equal(float_rows(weights, Stack(), slice(100, 200)), np.concatenate(values)[100:200])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 4999), min_size=1, max_size=60))
def test_scattered_rows_are_read_in_runs(wanted):
    w = held("w", np.arange(5000 * 64, dtype=np.float32).reshape(5000, 64))
    order = np.asarray(wanted, np.int64)
    found = float_rows([w], Rows(order), slice(0, len(order)))
    np.testing.assert_array_equal(found, w.dequantize()[order])
    reads = w.arrays["blocks"].reads
    spans = sorted(reads)
    assert all(b[0] - a[1] >= 256 for a, b in pairwise(spans))  # a gap of 64 KB is skipped
    assert sum(b - a for a, b in spans) <= 257 * len(set(wanted))


def test_one_matrix_of_a_stack_is_read_for_its_rows():
    w = held("w", np.random.default_rng(0).standard_normal((6, 40, 64)).astype(np.float32))
    float_rows([w], Transpose(), slice(64, 128))
    assert w.arrays["blocks"].reads == [(40, 80)]
