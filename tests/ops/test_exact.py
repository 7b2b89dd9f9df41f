"""ops/exact.py: each instruction set gives the bits of the numpy reference, and the functions are accurate."""

from __future__ import annotations

import math

import numpy as np
import pytest

from polyquant.ops import arithmetic, exact, native

SETS = native.module().exact_sets() if native.available() else []
sets = pytest.mark.parametrize("isa", SETS)


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(list(shape)).standard_normal(shape).astype(np.float32)


def definite(n: int) -> np.ndarray:
    x = normal(n + 5, n).astype(np.float64)
    return x.T @ x


# Edges of tiles, of blocks in depth (256), rows (512) and columns (1008), and of the work that threads share.
SHAPES = ((1, 1, 1, 1), (1, 7, 300, 50), (3, 33, 17, 65), (1, 530, 270, 1100), (2, 70, 513, 30), (5, 64, 64, 64))


@sets
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products(isa, shape):
    items, rows, depth, columns = shape
    a, b = normal(items, rows, depth), normal(items, columns, depth).transpose(0, 2, 1)
    out = np.empty((items, rows, columns), np.float32)
    native.module().exact_product(a, b, out, False, isa)
    assert np.array_equal(out, exact.product_reference(a, b))


@sets
@pytest.mark.parametrize("n", [1, 24, 130, 600])
def test_symmetric_products(isa, n):
    x, out = normal(70, n), np.empty((1, n, n), np.float32)
    native.module().exact_product(x.T[None], x[None], out, True, isa)
    assert np.array_equal(out[0], exact.product_reference(x.T, x))


@sets
@pytest.mark.parametrize("n", [1, 5, 64, 65, 100, 200])
def test_cholesky(isa, n):
    h = definite(n)
    found = h.copy()
    assert native.module().exact_cholesky(found, isa)
    assert np.array_equal(np.tril(found), exact.cholesky_reference(h))
    assert np.allclose(exact.cholesky_reference(h), np.linalg.cholesky(h), rtol=1e-9, atol=1e-9)


@sets
def test_exponentials(isa):
    wide = np.concatenate([np.random.default_rng(1).uniform(-800, 800, 20001), [np.nan, np.inf, -np.inf, 0.0]])
    out = np.empty_like(wide)
    native.module().exact_exponential(wide, out, isa)
    assert np.array_equal(out, exact.exp_reference(wide), equal_nan=True)
    short = np.random.default_rng(2).uniform(-110, 88, 20003).astype(np.float32)
    found = np.empty_like(short)
    native.module().exact_float_exponential(short, found, isa)
    assert np.array_equal(found, exact.exp_reference(short.astype(np.float64)).astype(np.float32))


@sets
@pytest.mark.parametrize("columns", [1, 7, 64, 100])
@pytest.mark.parametrize("sinks", [False, True])
def test_softmax(isa, columns, sinks):
    rng = np.random.default_rng(columns)
    scores = normal(40, columns) * np.float32(5)
    low = rng.integers(0, columns, 40).astype(np.int32)
    high = rng.integers(low + 1, columns + 1).astype(np.int32)
    extra = normal(40) if sinks else None
    found = scores.copy()
    native.module().exact_softmax(found, low, high, 0.125, extra, isa)
    assert np.array_equal(found, exact.softmax_reference(scores, low, high, 0.125, extra))
    fast = arithmetic.softmax(scores, low, high, 0.125, extra)
    assert np.allclose(found, fast, rtol=1e-5, atol=1e-7)


def test_a_product_is_the_rounded_sum():
    a, b = normal(9, 40), normal(40, 11)
    for engine in ("native", "numpy"):
        with native.engine(engine):
            assert np.allclose(exact.product(a, b), a.astype(np.float64) @ b.astype(np.float64), rtol=1e-6)
            assert np.array_equal(exact.product(a, b), exact.product_reference(a, b))


def test_products_of_stacks_broadcast():
    a, b = normal(3, 1, 8, 5), normal(2, 5, 7)
    assert np.array_equal(exact.product(a, b), exact.product_reference(a, b))
    assert exact.product(a, b).shape == (3, 2, 8, 7)
    assert exact.product(normal(4, 0), normal(0, 6)).tolist() == np.zeros((4, 6)).tolist()


def test_a_gram_matrix_and_column_dots():
    x = normal(300, 20)
    assert np.array_equal(exact.gram(x), exact.product(x.T, x))
    assert np.array_equal(np.diag(exact.gram(x)), exact.column_dots(x, x).astype(np.float32))


def test_solve():
    h, b = definite(90), normal(90).astype(np.float64)
    assert np.allclose(h @ exact.solve(h, b), b, rtol=1e-8, atol=1e-8)
    for engine in ("native", "numpy"):
        with native.engine(engine), pytest.raises(np.linalg.LinAlgError):
            exact.solve(-h, b)


@pytest.mark.parametrize(
    ("function", "reference", "span", "rtol", "atol"),
    [
        (exact.exp, math.exp, (-700, 700), 1e-15, 0),
        (exact.log, math.log, (1e-300, 3), 1e-15, 1e-16),
        (exact.log1p, math.log1p, (0, 0.01), 1e-12, 0),
        (exact.tanh, math.tanh, (-1, 1), 1e-13, 0),
        (exact.tanh, math.tanh, (-0.05, 0.05), 1e-13, 0),
        (exact.erfc, math.erfc, (-6, 26), 1e-12, 0),
        (lambda x: exact.cos_sin(x)[0], math.cos, (-3, 3), 0, 1e-15),
        (lambda x: exact.cos_sin(x)[1], math.sin, (-1e6, 1e6), 0, 2e-15),
        (lambda x: exact.power(x, 0.9), lambda x: x**0.9, (0, 1e5), 1e-14, 0),
    ],
)
def test_functions(function, reference, span, rtol, atol):
    x = np.random.default_rng(3).uniform(*span, 3000)
    assert np.allclose(function(x), [reference(v) for v in x], rtol=rtol, atol=atol)


def test_the_defined_order_ends_with_its_block():
    x = normal(3, 4)
    assert not arithmetic.is_defined()
    with arithmetic.defined_order():
        assert arithmetic.fast_kernels() is None
        assert np.array_equal(arithmetic.matmul(x, x.T), exact.product(x, x.T))
    assert arithmetic.fast_kernels() is native.lib()


def test_products_of_unaligned_arrays():
    """Tensors of a mapped file may begin at any byte."""
    rng = np.random.default_rng(7)
    a, b = rng.normal(size=(5, 9)).astype(np.float32), rng.normal(size=(9, 6)).astype(np.float32)
    raw = np.frombuffer(b"\0" + b.T.tobytes(), np.uint8)[1:].view(np.float32).reshape(6, 9)
    assert not raw.flags.aligned
    assert np.array_equal(exact.product(a, raw.T), exact.product(a, b))
    assert np.array_equal(exact.gram(raw), exact.gram(raw.copy()))
