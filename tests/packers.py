"""Reference packers for other tools' quantized checkpoints, value by value from the published layouts."""

from __future__ import annotations

import numpy as np

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def stream(codes, bits):
    """A row of codes -> int32 words, the first code in the lowest bits."""
    whole = 0
    for i, code in enumerate(codes):
        whole |= int(code) << (bits * i)
    words = -(-len(codes) * bits // 32)
    return np.frombuffer(whole.to_bytes(4 * words, "little"), "<i4").copy()


def gptq(codes, zeros, scales, bits, *, v2=False, g_idx=None):
    """codes [N, K] and zeros [N, G] unsigned, scales [N, G] -> the tensors of AutoGPTQ."""
    stored = (zeros - 1) % 8 if bits == 3 and not v2 else zeros
    qzeros = np.stack([stream(group, bits) for group in stored.T], 0)
    if bits != 3 and not v2:  # of a whole word at once: a zero of 0 borrows from the next
        qzeros = (qzeros.astype(np.int64) - sum(1 << at for at in range(0, 32, bits))).astype(np.uint32).view(np.int32)
    found = {
        "qweight": np.stack([stream(row, bits) for row in codes], 1),
        "qzeros": qzeros,
        "scales": np.ascontiguousarray(scales.T).astype(np.float16),
    }
    return found if g_idx is None else {**found, "g_idx": np.asarray(g_idx, np.int32)}


def awq(codes, zeros, scales):
    """codes [N, K] and zeros [N, G] of 4 bits, scales [N, G] -> the tensors of AutoAWQ (gemm)."""

    def words(rows):  # [R, N] -> int32 [R, N / 8]
        out = np.zeros((len(rows), rows.shape[1] // 8), np.int64)
        for i, column in enumerate(AWQ_ORDER):
            out |= rows[:, column::8].astype(np.int64) << (4 * i)
        return out.astype(np.uint32).view(np.int32)

    return {
        "qweight": words(codes.T),
        "qzeros": words(zeros.T),
        "scales": np.ascontiguousarray(scales.T).astype(np.float16),
    }


def compressed(codes, scales, bits, zeros=None, dtype=np.float32):
    """Signed codes [N, K], scales and zeros [N, G] -> the tensors of compressed-tensors' pack-quantized."""
    half = 2 ** (bits - 1)
    found = {
        "weight_packed": np.stack([stream(row + half, bits) for row in codes.astype(int)]),
        "weight_scale": scales.astype(dtype),
        "weight_shape": np.array(codes.shape, np.int64),
    }
    if zeros is not None:
        found["weight_zero_point"] = np.stack([stream(column + half, bits) for column in zeros.T.astype(int)], 1)
    return found


def some_codes(seed, n, k, groups, bits):
    """Return unsigned codes [N, K], zeros [N, G] and half-precision scales [N, G], with every zero if possible."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 2**bits, (n, k))
    zeros = np.arange(n * groups).reshape(n, groups) % 2**bits
    return codes, zeros, rng.uniform(0.001, 0.1, (n, groups)).astype(np.float16).astype(np.float32)
