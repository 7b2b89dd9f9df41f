"""The inverse of a translation: splits, stacks, transposes and shifts are undone."""

from __future__ import annotations

import numpy as np
import pytest

from polyquant.errors import UnsupportedError
from polyquant.inversion import inverted
from polyquant.operations import (
    SAME,
    AddConstant,
    Concat,
    Interleave,
    Matrix,
    Reshape,
    Rows,
    Slice,
    Stack,
    Transpose,
    chain,
)
from polyquant.types import TensorMap

HALF = chain(Reshape((4, 24, 16)), Slice(0, 8, axis=1), Transpose())  # attn_k_b of kv_b_proj, per head
REST = chain(Reshape((4, 24, 16)), Slice(8, 24, axis=1))
PERMUTED = Rows(np.array([3, 1, 0, 2]))

CASES = {
    "as it is": [("a", ["x"], SAME)],
    "a norm": [("a", ["n"], AddConstant(1.0))],
    "rows": [("a", ["r"], PERMUTED)],
    "experts to a stack": [("a", ["x", "y", "z"], Stack())],
    "a stack to experts": [("a", ["s"], Matrix(0)), ("c", ["s"], Matrix(2)), ("b", ["s"], Matrix(1))],
    "a fused projection": [("k", ["f"], Slice(4, 6)), ("q", ["f"], chain(Slice(0, 4), PERMUTED)),
        ("v", ["f"], Slice(6, 8))],
    "q, k, v joined": [("f", ["x", "y", "z"], Concat())],
    "gate and up of a transposed stack": [
        ("g", ["s"], chain(Slice(0, 3, axis=2), Transpose())), ("u", ["s"], chain(Slice(3, 6, axis=2), Transpose())),
    ],
    "even and odd columns": [
        ("g", ["s"], chain(Slice(0, 6, 2, axis=2), Transpose())),
        ("u", ["s"], chain(Slice(1, 6, 2, axis=2), Transpose())),
    ],
    "in turn": [("s", ["x", "y"], Interleave())],
    "kv_b": [("k_b", ["kv"], HALF), ("v_b", ["kv"], REST)],
    "rows before the split": [("a", ["r"], chain(PERMUTED, Slice(0, 1))), ("b", ["r"], chain(PERMUTED, Slice(1, 4)))],
    "tied": [("embedding", ["x"], SAME), ("head", ["x"], SAME)],
}  # fmt: skip
SHAPES = {
    "x": (4, 6), "y": (4, 6), "z": (4, 6), "n": (6,), "r": (4, 6), "s": (3, 5, 6), "f": (8, 6), "kv": (96, 16),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_inverse_restores_the_sources(case):
    rng = np.random.default_rng(0)
    source = {n: rng.standard_normal(s).astype(np.float32) for n, s in SHAPES.items()}
    maps = [TensorMap(t, tuple(n), op.shape([SHAPES[x] for x in n]), op) for t, n, op in CASES[case]]
    made = {m.target: m.op.reference([source[n] for n in m.sources]) for m in maps}
    back = inverted(maps, SHAPES)
    assert [b.target for b in back] == list(dict.fromkeys(n for m in maps for n in m.sources))
    for b in back:
        found = [made[n] for n in b.sources]
        assert b.op.shape([f.shape for f in found], b.target) == b.shape == SHAPES[b.target]
        np.testing.assert_allclose(b.op.reference(found), source[b.target], rtol=1e-6, atol=1e-6)
    again = inverted(back, {t: a.shape for t, a in made.items()})
    for m in again:
        np.testing.assert_allclose(m.op.reference([source[n] for n in m.sources]), made[m.target], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "ops",
    [
        [Slice(0, 4)],
        [Slice(0, 4), Slice(5, 8)],
        [Slice(0, 5), Slice(4, 8)],
        [Slice(0, 8, 2), Slice(1, 7, 2)],
        [Slice(0, 4), Slice(0, 3, axis=1)],
        [Rows(np.array([0, 1]))],
        [chain(Rows(np.arange(8)[::-1].copy()), Slice(0, 4)), Slice(4, 8)],
    ],
)
def test_an_incomplete_source_is_refused(ops):
    maps = [TensorMap(f"t{i}", ("f",), op.shape([(8, 6)]), op) for i, op in enumerate(ops)]
    with pytest.raises(UnsupportedError, match=r"f: .*contain"):
        inverted(maps, {"f": (8, 6)})
