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

    assert output_error(quantize_for(traits, w, hessian)) < output_error(quantize(traits, w))


def test_values_that_scales_cannot_hold():
    w = np.full((2, 32), 1e-30, np.float32)
    w[1] = 3e38
    codes = quantize(Integers(4, 32, "f16"), w)
    assert np.isfinite(codes.scale).all()
    assert (codes.scale != 0).all()
