"""Every operation against numpy: whole arrays, row blocks of any size, packed rows, the inverse, and errors."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyquant.errors import InputError, UnsupportedError
from polyquant.operations import (
    SAME,
    AddConstant,
    Chain,
    Concat,
    Interleave,
    Joined,
    Matrix,
    MinusExp,
    Multiply,
    MultiplyRows,
    Reshape,
    Rows,
    Slice,
    Stack,
    Transpose,
    chain,
)
from polyquant.types import as_matrix

sizes = st.integers(1, 5)
shapes_of = st.lists(sizes, min_size=1, max_size=4).map(tuple)


def axis_of(shape):
    return st.integers(0, len(shape) - 1)


@st.composite
def along_an_axis(draw):
    """(operation, shapes of its sources)."""
    shape = draw(shapes_of)
    axis = draw(axis_of(shape))
    n = shape[axis]
    kind = draw(st.sampled_from(["rows", "slice", "concat", "interleave"]))
    if kind == "rows":
        order = draw(st.one_of(st.permutations(range(n)), st.lists(st.integers(0, n - 1), max_size=7)))
        return Rows(np.asarray(order, np.int64), axis), [shape]
    if kind == "slice":
        start = draw(st.integers(0, n))
        return Slice(start, draw(st.integers(start, n)), draw(st.integers(1, 3)), axis), [shape]
    if kind == "concat":
        lengths = draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
        return Concat(axis), [(*shape[:axis], m, *shape[axis + 1 :]) for m in lengths]
    return Interleave(axis), [shape] * draw(st.integers(1, 3))


@st.composite
def of_one_shape(draw):
    """(operation, shapes of its sources)."""
    shape = draw(shapes_of)
    found = [
        SAME,
        AddConstant(1.0),
        Multiply(-1.5),
        MinusExp(),
        Reshape((math.prod(shape[:-1]), shape[-1])),
        Reshape((math.prod(shape), 1)),
    ]
    if len(shape) > 1:
        found += [Transpose(), Matrix(draw(st.integers(0, shape[0] - 1)))]
    if len(shape) == 2:
        first = draw(st.integers(0, shape[0]))
        found.append(MultiplyRows(((first, 0.5), (shape[0] - first, -3.0))))
    op = draw(st.sampled_from(found))
    return op, [shape]


@st.composite
def stacks(draw):
    """(operation, shapes of its sources)."""
    return Stack(), [draw(shapes_of)] * draw(st.integers(1, 4))


simple = st.one_of(along_an_axis(), of_one_shape(), stacks())


@st.composite
def chains(draw):
    """Two or three operations, or each source by itself and then all."""
    op, shapes = draw(simple)
    if draw(st.booleans()):
        made = [op.shape([s]) if len(shapes) == 1 else s for s in shapes]
        each = tuple(op if len(shapes) == 1 else SAME for _ in shapes)
        return Joined((*each, *each), Stack()) if len(set(made)) == 1 else op, shapes * (
            2 if len(set(made)) == 1 else 1
        )
    steps, shape = [op], op.shape(shapes)
    for _ in range(draw(st.integers(1, 2))):
        for later in (Transpose(), AddConstant(0.5), Reshape((math.prod(shape[:-1]), shape[-1]))):
            if draw(st.booleans()) and (len(shape) > 1 or not isinstance(later, Transpose)) and shape:
                try:
                    shape = later.shape([shape])
                except InputError:
                    continue
                steps.append(later)
    return chain(*steps), shapes


def arrays(shapes, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(s).astype(np.float32) for s in shapes]


def by_blocks(op, found, shapes, size):
    """The target [rows, K], `size` rows at a time, of the sources' matrices."""
    rows = as_matrix(op.shape(shapes))[0]
    out = []
    for a in range(0, max(1, rows), size):
        index = np.arange(a, min(rows, a + size))
        wanted = op.needs(index, shapes)
        out.append(op.make([m[w] for m, w in zip(found, wanted, strict=True)], index, shapes))
    return np.concatenate(out)


@settings(max_examples=300, deadline=None)
@given(st.one_of(simple, chains()), st.integers(1, 4))
def test_row_blocks_equal_the_reference(case, size):
    op, shapes = case
    found = arrays(shapes)
    expected = op.reference(found)
    assert op.shape(shapes) == expected.shape
    blocks = by_blocks(op, [a.reshape(as_matrix(a.shape)) for a in found], shapes, size)
    np.testing.assert_array_equal(blocks, expected.reshape(as_matrix(expected.shape)))


@settings(max_examples=200, deadline=None)
@given(st.one_of(simple, chains()), st.integers(1, 4))
def test_packed_rows_move_like_float_rows(case, size):
    op, shapes = case
    if not op.keeps_rows(shapes):
        return
    found = [a.reshape(as_matrix(a.shape)) for a in arrays(shapes)]
    packed = [a.view(np.uint8).reshape(len(a), 4 * a.shape[1])[:, ::-1] for a in found]  # one byte string a row
    moved = by_blocks(op, packed, shapes, size)
    expected = op.reference(arrays(shapes))
    np.testing.assert_array_equal(
        np.ascontiguousarray(moved[:, ::-1]).view(np.float32).reshape(expected.shape), expected
    )


@settings(max_examples=200, deadline=None)
@given(st.one_of(simple, chains()))
def test_the_inverse_restores_every_source(case):
    op, shapes = case
    found = arrays(shapes)
    target = op.reference(found)
    try:
        back = op.inverse(shapes)
    except UnsupportedError:
        return
    assert len(back) == len(found)
    for way, a in zip(back, found, strict=True):
        assert way.shape([target.shape]) == a.shape
        np.testing.assert_allclose(way.reference([target]), a, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("op", [Slice(0, 2), Matrix(1), Rows(np.array([0, 0])), Chain((Slice(0, 2), Transpose()))])
def test_a_part_cannot_be_inverted(op):
    with pytest.raises(UnsupportedError, match="invert all the operations"):
        op.inverse([(4, 4)])


@pytest.mark.parametrize(
    ("op", "shapes", "expected"),
    [
        (Rows(np.array([4])), [(4, 2)], "0 to 3"),
        (Rows(np.array([-1])), [(4, 2)], "0 to 3"),
        (Slice(2, 5), [(4, 2)], "0 to 4"),
        (Slice(0, 1, axis=2), [(4, 2)], "axis 2"),
        (Concat(), [(4, 2), (4, 3)], r"\[2\]"),
        (Concat(1), [(4, 2), (3, 2)], r"\[4\]"),
        (Concat(), [(4, 2), (4,)], r"\[2\]"),
        (Concat(), [], "axis 0"),
        (Stack(), [(4, 2), (4, 3)], r"\[4, 2\]"),
        (Stack(), [], "a source"),
        (Interleave(), [(4, 2), (3, 2)], r"\[4\]"),
        (Matrix(3), [(3, 2, 2)], "more than 3"),
        (Matrix(0), [(3,)], "a stack"),
        (Transpose(), [(3,)], "a matrix"),
        (Reshape((2, 2)), [(3,)], r"\[2, 2\]"),
        (Joined((SAME, SAME), Stack()), [(3,)], "2"),
        (SAME, [(3,), (3,)], "1 source"),
        (chain(Slice(0, 2), Matrix(2)), [(4, 2)], "more than 2"),
        (MultiplyRows(((1, 2.0), (2, 3.0))), [(4, 2)], "3 rows"),
    ],
)
def test_mismatched_shapes_are_refused_by_name(op, shapes, expected):
    with pytest.raises(InputError, match=rf"^blk\.0\.x: .*expected.*{expected}.*found"):
        op.shape(shapes, "blk.0.x")


def test_fingerprints_of_operations_are_unique():
    found = [SAME, Rows(np.arange(4)), Rows(np.arange(4), 1), Rows(np.arange(4)[::-1].copy()), Slice(0, 4),
        Slice(0, 4, 2), Concat(), Concat(1),
             Interleave(), Stack(), Matrix(0), Matrix(1), Transpose(), Reshape((4, 4)), Multiply(1.0), MinusExp(),
             AddConstant(1.0), AddConstant(2.0), MultiplyRows(((4, 1.0),)), MultiplyRows(((4, 2.0),)),
             Chain((Slice(0, 4), Transpose())), Chain((Transpose(), Slice(0, 4))),
             Joined((SAME, Transpose()), Stack())]  # fmt: skip
    assert len({op.identity for op in found}) == len(found)


def test_matrices_of_a_stack_are_computed_separately():
    """A transpose of a large stack holds one matrix at a time."""
    op, shapes = chain(Slice(0, 3, axis=2), Transpose()), [(8, 4, 6)]
    assert op.together(shapes) == 3
    (wanted,) = op.needs(np.arange(3, 6), shapes)
    np.testing.assert_array_equal(wanted, np.arange(4, 8))
    assert chain(Slice(0, 2), Rows(np.array([1, 0]))).together([(8, 4)]) == 1


def test_a_decay_is_the_nearest_float():
    x = np.log(np.arange(1, 200, dtype=np.float32))
    expected = (-np.exp(x.astype(np.float64))).astype(np.float32)
    np.testing.assert_array_equal(MinusExp().reference([x]), expected)
    (back,) = MinusExp().inverse([x.shape])
    np.testing.assert_allclose(back.reference([expected]), x, rtol=1e-6, atol=1e-7)


def test_sections_of_rows_have_separate_factors():
    (x,) = arrays([(5, 3)])
    op = MultiplyRows(((2, 0.5), (0, 7.0), (3, -2.0)))
    made = op.reference([x])
    np.testing.assert_array_equal(made[:2], x[:2] * np.float32(0.5))
    np.testing.assert_array_equal(made[2:], x[2:] * np.float32(-2))
    np.testing.assert_array_equal(op.inverse([x.shape])[0].reference([made]), x)
    with pytest.raises(UnsupportedError, match="zero"):
        MultiplyRows(((5, 0.0),)).inverse([x.shape])
