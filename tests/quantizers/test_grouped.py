"""Searched grids: kernel and reference agree bit for bit, and the error is never above plain rounding."""

import numpy as np
import pytest

from polyquant.codecs.affine_codec import decoded_rows
from polyquant.codecs.keeping import Integers
from polyquant.ops.native import engine
from polyquant.quantizers.grouped import quantize
from polyquant.quantizers.grouped_inputs import quantize_for

TRAITS = [
    Integers(4, 32, "f16"), Integers(4, 128, "bf16", "integer"), Integers(4, 64, "bf16", "bias"),
    Integers(8, 0, "bf16"), Integers(8, 0, "f32", tensor=True), Integers(2, 32, "f16", "bias"),
    Integers(3, 64, "f16", "integer"), Integers(6, 64, "f32", "bias"), Integers(5, 0, "f16", "integer"),
]  # fmt: skip


def weights(rows, k):
    w = np.random.default_rng([rows, k]).standard_t(4, (rows, k)).astype(np.float32) * np.float32(0.03)
    w[0] = 0
    w[1, : k // 2] = -1e-9
    return w


def plain(traits, w):
    """Min-max rounding without a search."""
    cells = w.reshape(len(w), -1, traits.group or w.shape[1]) if not traits.tensor else w.reshape(1, 1, -1)
    half = 2 ** (traits.bits - 1)
    if traits.zero == "none":
        scale = np.abs(cells).max(2, keepdims=True) / (half - 0.5)
        q = np.clip(np.rint(cells / np.where(scale == 0, 1, scale)), -half, half - 1) * scale
        return q.reshape(w.shape)
    low, high = np.minimum(cells.min(2, keepdims=True), 0), np.maximum(cells.max(2, keepdims=True), 0)
    scale = np.where(high == low, 1, (high - low) / (2 * half - 1))
    zero = np.rint(-low / scale)
    return ((np.clip(np.rint(cells / scale + zero), 0, 2 * half - 1) - zero) * scale).reshape(w.shape)


@pytest.mark.parametrize("traits", TRAITS, ids=str)
def test_kernel_equals_the_reference(traits):
    k = 384 if traits.group else 77
    w, importance = weights(40, k), np.random.default_rng(1).uniform(0.1, 3, k).astype(np.float32)
    for given in (None, importance):
        fast = quantize(traits, w, given)
        with engine("numpy"):
            slow = quantize(traits, w, given)
        for field in ("codes", "scale", "offset"):
            np.testing.assert_array_equal(getattr(fast, field), getattr(slow, field), err_msg=field)
        np.testing.assert_array_equal(*(np.asarray(x.bias, object) for x in (fast, slow)))


@pytest.mark.parametrize("traits", TRAITS, ids=str)
def test_error_is_below_plain_rounding(traits):
    w = weights(48, 256)[2:]
    searched = np.square(decoded_rows(quantize(traits, w)) - w).sum()
    assert searched <= np.square(plain(traits, w) - w).sum() * (1.002 if traits.bits == 8 else 1)


@pytest.mark.parametrize("traits", [t for t in TRAITS if not t.tensor], ids=str)
def test_a_hessian_lowers_the_error_of_the_outputs(traits):
    rng = np.random.default_rng(3)
    w, x = weights(24, 128), rng.standard_normal((512, 128)) @ (np.eye(128) + 0.2 * rng.standard_normal((128, 128)))
    hessian = (x.T @ x / len(x)).astype(np.float32)

    def output_error(codes):
        d = decoded_rows(codes) - w
        return np.einsum("nk,kj,nj->", d, hessian, d)

    codes = quantize_for(traits, w, hessian)
    assert output_error(codes) < (0.99 if traits.bits == 8 else 0.9) * output_error(quantize(traits, w))
    with engine("numpy"):
        slow = quantize_for(traits, w, hessian)
    for field in ("codes", "scale", "offset"):
        np.testing.assert_array_equal(getattr(codes, field), getattr(slow, field), err_msg=field)
    unsteady = np.full_like(hessian, np.nan)
    np.testing.assert_array_equal(quantize_for(traits, w, unsteady).codes, quantize(traits, w).codes)


def test_calibrated_codes_beat_plain_compensation():
    """Against rounding from left to right with one search of the scale per group, as GPTQ is usually written."""
    rng = np.random.default_rng(5)
    traits, k = Integers(4, 32, "bf16"), 256
    w = weights(48, k)[2:]
    x = rng.standard_normal((1024, k)) * np.linspace(2, 0.05, k)[rng.permutation(k)]
    x = (x @ (np.eye(k) + 0.1 * rng.standard_normal((k, k)))).astype(np.float32)
    hessian = x.T @ x / np.float32(len(x))
    damped = hessian + 0.01 * np.trace(hessian) / k * np.eye(k)
    upper = np.linalg.cholesky(np.linalg.inv(damped)).T
    grid, work, plain = quantize(traits, w, np.diag(hessian).copy()), w.astype(np.float64), np.empty(w.shape)
    for j in range(k):
        scale = grid.scale[:, j // 32].astype(np.float64)
        plain[:, j] = np.clip(np.rint(work[:, j] / scale), -8, 7) * scale
        work[:, j:] -= np.outer((work[:, j] - plain[:, j]) / upper[j, j], upper[j, j:])
    errors = [np.square(x @ (w - q).T).sum() for q in (decoded_rows(quantize_for(traits, w, hessian)), plain)]
    assert errors[0] < 0.9 * errors[1], errors


def test_values_that_scales_cannot_hold():
    w = np.full((2, 32), 1e-30, np.float32)
    w[1] = 3e38
    codes = quantize(Integers(4, 32, "f16"), w)
    assert np.isfinite(codes.scale).all()
    assert (codes.scale != 0).all()
