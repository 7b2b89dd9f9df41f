"""LDLQ for Trellis codes: the factor, the theoretical gain, any shape, and unusable Hessians."""

import numpy as np
import pytest

import polyquant as pq
from polyquant.errors import CodecError
from polyquant.ops.linalg import block_ldl
from polyquant.quantizers.ldlq import quantize_trellis


def hessian(eigenvalues: np.ndarray, seed: int = 0) -> np.ndarray:
    """[K, K] with these eigenvalues and random eigenvectors."""
    rng = np.random.default_rng(seed)
    q, _ = np.linalg.qr(rng.standard_normal((len(eigenvalues), len(eigenvalues))))
    return ((q * eigenvalues) @ q.T).astype(np.float32)


def cost(codec, codes, w, h) -> float:
    """tr(E H E^T) of a weight [N, K]."""
    e = (codec.dequantize(codec.pack(codes), w.shape) - w).astype(np.float64)
    return float(np.einsum("nk,nk->", e @ h, e))


def test_block_ldl_reproduces_the_matrix():
    h = hessian(np.linspace(0.5, 3, 64)).astype(np.float64)
    lower, middle = block_ldl(h, 16)
    inverse = np.linalg.inv(lower.astype(np.float64))
    d = inverse @ h @ inverse.T
    blocks = d.reshape(4, 16, 4, 16)
    for i in range(4):
        assert np.array_equal(lower[16 * i : 16 * i + 16, 16 * i :], np.eye(16, 64 - 16 * i, dtype=np.float32))
        assert np.allclose(np.diag(blocks[i, :, i]), middle[16 * i : 16 * i + 16], rtol=1e-4)
        blocks[i, :, i] = 0
    assert np.abs(d).max() < 1e-5


def test_block_ldl_refuses_indefinite_matrices():
    with pytest.raises(np.linalg.LinAlgError):
        block_ldl(np.diag([1.0, -1.0] * 8), 16)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_gain_is_the_ratio_of_the_means_of_the_eigenvalues(bits):
    """Geometric over arithmetic mean, 0.72, within 10 %."""
    eigenvalues = np.exp(-np.linspace(0, 3, 512))
    h = hessian(eigenvalues)
    damped = eigenvalues + 0.025 * eigenvalues.mean()
    theory = np.exp(np.log(damped).mean()) / damped.mean()
    w = np.random.default_rng(1).standard_normal((64, 512)).astype(np.float32)
    codec = pq.codec(f"trellis.{bits}", window_bits=8)
    full = h + np.float32(0.025 * eigenvalues.mean()) * np.eye(512, dtype=np.float32)
    plain, found = (quantize_trellis(codec, w, x) for x in (None, h))
    assert not found.note
    assert cost(codec, found.codes, w, full) / cost(codec, plain.codes, w, full) == pytest.approx(theory, rel=0.1)


@pytest.mark.parametrize(
    "name", ["trellis.2.mul1.8.h16x8", "trellis.3.mul1.8.flat", "trellis.4.grid", "trellis.3.mcg.9.h1x1"]
)
@pytest.mark.parametrize("shape", [(8, 48), (40, 16)])
def test_calibration_lowers_the_error_of_every_kind_of_codec(name, shape):
    codec = pq.codec(name)
    h = hessian(np.exp(-np.linspace(0, 4, shape[1])))
    w = np.random.default_rng(2).standard_normal(shape).astype(np.float32)
    plain, found = (quantize_trellis(codec, w, x).codes for x in (None, h))
    assert cost(codec, found, w, h) < cost(codec, plain, w, h)


@pytest.mark.parametrize("shape", [(1, 1), (7, 13), (17, 31), (33, 200)])
@pytest.mark.parametrize("name", ["trellis.3.mul1.8", "trellis.4.grid", "trellis.2.mul1.8.exl3"])
def test_any_shape(name, shape):
    codec = pq.codec(name)
    w = np.random.default_rng(3).standard_normal(shape).astype(np.float32)
    x = np.random.default_rng(4).standard_normal((64, shape[1])).astype(np.float32)
    for h in (None, x.T @ x / 64, np.square(x).mean(0)):
        codes = quantize_trellis(codec, w, h).codes
        assert codes.codes.shape == (-(-shape[1] // 16), -(-shape[0] // 16), 256)
        restored = codec.dequantize(codec.pack(codes), shape)
        assert np.square(restored - w).mean() < 0.5 * np.square(w).mean()


def test_a_weight_of_zeros_stays_zero():
    codec = pq.codec("trellis.3.mul1.8")
    w = np.zeros((32, 32), np.float32)
    for h in (None, np.eye(32, dtype=np.float32)):
        assert not codec.dequantize(codec.pack(quantize_trellis(codec, w, h).codes), w.shape).any()


def test_importance_is_the_diagonal():
    codec = pq.codec("trellis.3.mul1.8")
    rng = np.random.default_rng(5)
    w, importance = rng.standard_normal((16, 32)).astype(np.float32), rng.uniform(0.1, 9, 32).astype(np.float32)
    damped = np.diag(
        importance + np.float32(0.025) * importance.mean()
    )  # so that an input of no importance counts a little
    a, b = codec.quantize(w, importance=importance), codec.quantize(w, hessian=damped)
    assert np.array_equal(a.codes, b.codes)
    assert cost(codec, a, w, np.diag(importance)) < cost(codec, codec.quantize(w), w, np.diag(importance))


def test_an_indefinite_hessian_gets_more_damping():
    codec = pq.codec("trellis.3.mul1.8")
    w = np.random.default_rng(6).standard_normal((16, 32)).astype(np.float32)
    slightly, never = np.ones(32), np.ones(32)
    slightly[0], never[:8] = -0.05, -2
    assert "damped by 0.1" in quantize_trellis(codec, w, hessian(slightly)).note
    found = quantize_trellis(codec, w, hessian(never))
    assert "not positive definite" in found.note
    assert np.array_equal(found.codes.codes, codec.quantize(w).codes)


@pytest.mark.parametrize("broken", [np.zeros((32, 32), np.float32), np.full((32, 32), np.nan, np.float32)])
def test_a_zero_or_nan_hessian_is_ignored(broken):
    codec = pq.codec("trellis.3.mul1.8")
    w = np.random.default_rng(7).standard_normal((16, 32)).astype(np.float32)
    assert "not calibrated" in quantize_trellis(codec, w, broken).note


def test_a_hessian_of_the_wrong_size_is_refused():
    with pytest.raises(CodecError, match="does not fit this weight"):
        pq.codec("trellis.3.mul1.8").quantize(np.ones((4, 8), np.float32), hessian=np.eye(4, dtype=np.float32))


def test_results_are_deterministic():
    codec = pq.codec("trellis.3.mul1.8")
    rng = np.random.default_rng(8)
    w, x = rng.standard_normal((48, 300)).astype(np.float32), rng.standard_normal((400, 300)).astype(np.float32)
    a, b = (codec.pack(quantize_trellis(codec, w, x.T @ x).codes) for _ in range(2))
    assert all(a[key].tobytes() == b[key].tobytes() for key in a)
