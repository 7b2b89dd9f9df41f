"""Integer products of many tokens against the numpy reference."""

from __future__ import annotations

import numpy as np
import pytest

import polyquant as pq
from polyquant.ops import native
from polyquant.ops.matmul import Group


@pytest.mark.parametrize(("rows", "k"), [(7, 30), (50, 1027), (97, 64)])
def test_sums_of_many_tokens_are_exact(rows: int, k: int, kernels: str) -> None:
    """The last vector of 16 tokens is full or not, columns are no multiple of four, the last tile has fewer rows."""
    rng = np.random.default_rng(rows)
    codec = pq.codec("w8a8.dynamic")
    parts = dict(codec.pack(codec.quantize(rng.standard_normal((rows, k)).astype(np.float32))))
    group = Group([codec.packed(parts, (rows, k))], [rows])
    x = rng.standard_normal((130, k)).astype(np.float32)
    with native.engine("numpy"):
        want = Group([codec.packed(parts, (rows, k))], [rows])(x, "token")[0]
    for tokens in (5, 16, 17, 33, 64, 65, 130):
        np.testing.assert_array_equal(group(x[:tokens], "token")[0], want[:tokens], err_msg=str(tokens))
