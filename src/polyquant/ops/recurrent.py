"""Recurrent operations between a layer's matrices, in numpy, float32: causal convolution, Mamba-2's scan, the gated
delta rule.

A scan maps the state before the first token to the one after the last. `..._steps` goes token by token, following the
definition; the scan itself processes chunks of tokens: interactions within a chunk are matrix products, and only the
state passes from chunk to chunk.

State space (Dao and Gu 2024, section 6; H heads of size P with N states; B and C are shared within a group of heads):

    S_t = exp(dt_t a) S_t-1 + dt_t x_t B_t^T    y_t = S_t C_t

Gated delta rule (Yang, Kautz and Hatamizadeh 2024; key size K, value size V; chunks by the UT transform of their
section 3.3):

    S_t = exp(g_t) S_t-1 + k_t (beta_t (v_t - (exp(g_t) S_t-1)^T k_t))^T    y_t = S_t^T q_t
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from polyquant.ops.arithmetic import exp, is_defined, log1p, matmul
from polyquant.types import F32

__all__ = [
    "convolve",
    "delta_rule",
    "delta_rule_steps",
    "sigmoid",
    "silu",
    "softplus",
    "state_space",
    "state_space_steps",
    "unit",
]

_LONGEST = 64
_LEAST_SHARED = 1 << 18
"""OpenBLAS multithreads larger products: 10 to 200 times slower for many small ones when processors are busy
(measured)."""


def sigmoid(x: F32) -> F32:
    """Return 1 / (1 + exp(-x))."""
    with np.errstate(over="ignore"):
        return np.asarray(1 / (1 + exp(-x)), np.float32)


def silu(x: F32) -> F32:
    """Return x / (1 + exp(-x))."""
    return x * sigmoid(x)


def softplus(x: F32) -> F32:
    """Return ln(1 + exp(x)) without overflow."""
    if not is_defined():
        return np.asarray(np.logaddexp(x, np.float32(0)), np.float32)
    wide = x.astype(np.float64)
    return np.asarray(np.maximum(wide, 0) + log1p(exp(-np.abs(wide))), np.float32)


def unit(x: F32, eps: float = 1e-6) -> F32:
    """Return x / sqrt(sum of x^2 + eps) over the last axis."""
    return np.asarray(x / np.sqrt(np.square(x).sum(-1, keepdims=True) + np.float32(eps)), np.float32)


def convolve(window: F32, x: F32, kernel: F32, bias: F32 | None) -> tuple[F32, F32]:
    """Convolve each channel causally; return (y [T, C], the window after x).

    window [k - 1, C]: the inputs before x [T, C]. kernel [C, k]: its last column applies to the current position. bias
    [C].
    """
    span, tokens = kernel.shape[1], len(x)
    inputs = np.concatenate([window, x])  # [k - 1 + T, C]
    y = inputs[:tokens] * kernel[:, 0]
    for j in range(1, span):
        y += inputs[j : j + tokens] * kernel[:, j]
    return (y if bias is None else y + bias), inputs[tokens:].copy()


def state_space_steps(state: F32, x: F32, dt: F32, a: F32, b: F32, c: F32) -> tuple[F32, F32]:
    """Scan token by token: state [H, P, N], x [T, H, P], dt [T, H], a [H] < 0, b, c [T, G, N] -> (y [T, H, P],
    state)."""
    each = x.shape[1] // b.shape[1]
    y = np.empty_like(x)
    for t in range(len(x)):
        decay = exp(dt[t] * a)[:, None, None]
        added = (x[t] * dt[t][:, None])[:, :, None] * b[t].repeat(each, 0)[:, None]
        state = state * decay + added
        y[t] = matmul(state, c[t].repeat(each, 0)[:, :, None])[:, :, 0]
    return y, state


def state_space(state: F32, x: F32, dt: F32, a: F32, b: F32, c: F32, *, chunk: int = 0) -> tuple[F32, F32]:
    """Compute `state_space_steps` in chunks of `chunk` tokens, 0 for a size that suits the state."""
    if len(x) == 1:
        return state_space_steps(state, x, dt, a, b, c)
    return _in_chunks(lambda s, at: _state_space_chunk(s, x[at], dt[at], a, b[at], c[at]), state, len(x), chunk)


def _state_space_chunk(state: F32, x: F32, dt: F32, a: F32, b: F32, c: F32) -> tuple[F32, F32]:
    (tokens, heads, size), groups = x.shape, b.shape[1]
    total = np.cumsum(dt * a, axis=0).T  # [H, L]: the log of the remaining factor of the state before the chunk
    keys, queries = b.swapaxes(0, 1), c.swapaxes(0, 1)  # [G, L, N]
    inner = (x * dt[:, :, None]).swapaxes(0, 1)  # [H, L, P]
    mixed = matmul(queries, keys.swapaxes(1, 2))[:, None] * _decays(total).reshape(groups, -1, tokens, tokens)
    y = matmul(mixed.reshape(heads, tokens, tokens), inner)
    grouped = state.reshape(groups, -1, size, state.shape[2])
    before = matmul(queries[:, None], grouped.swapaxes(2, 3)).reshape(heads, tokens, size)
    y += before * exp(total)[:, :, None]
    decayed = inner * exp(total[:, -1:] - total)[:, :, None]
    added = matmul(decayed.reshape(groups, -1, tokens, size).swapaxes(2, 3), keys[:, None])
    state = state * exp(total[:, -1])[:, None, None] + added.reshape(state.shape)
    return np.ascontiguousarray(y.swapaxes(0, 1)), np.asarray(state, np.float32)


def delta_rule_steps(state: F32, q: F32, k: F32, v: F32, g: F32, beta: F32) -> tuple[F32, F32]:
    """Scan token by token: state [H, K, V], q, k [T, H, K], v [T, H, V], g <= 0 and beta [T, H] -> (y [T, H, V],
    state)."""
    y = np.empty_like(v)
    for t in range(len(v)):
        state = state * exp(g[t])[:, None, None]
        recalled = matmul(k[t][:, None], state)[:, 0]
        state = state + k[t][:, :, None] * ((v[t] - recalled) * beta[t][:, None])[:, None]
        y[t] = matmul(q[t][:, None], state)[:, 0]
    return y, state


def delta_rule(state: F32, q: F32, k: F32, v: F32, g: F32, beta: F32, *, chunk: int = 0) -> tuple[F32, F32]:
    """Compute `delta_rule_steps` in chunks of `chunk` tokens, 0 for a size that suits the state."""
    if len(v) == 1:
        return delta_rule_steps(state, q, k, v, g, beta)
    return _in_chunks(lambda s, at: _delta_rule_chunk(s, q[at], k[at], v[at], g[at], beta[at]), state, len(v), chunk)


def _delta_rule_chunk(state: F32, q: F32, k: F32, v: F32, g: F32, beta: F32) -> tuple[F32, F32]:
    """Compute one chunk: each token's update depends on the earlier ones of the chunk, a triangular system per head."""
    q, k, v = (x.swapaxes(0, 1) for x in (q, k, v))  # [H, L, ...]
    total, rate = np.cumsum(g, axis=0).T, beta.T[:, :, None]  # [H, L], [H, L, 1]
    decay, keys = _decays(total), k.swapaxes(1, 2)
    system = np.asarray(np.tril(matmul(k * rate, keys) * decay, -1), np.float32)
    grown = exp(total)[:, :, None]
    target = rate * (v - grown * matmul(k, state))
    written = _solve_triangular(system, target)
    y = grown * matmul(q, state) + matmul(matmul(q, keys) * decay, written)
    decayed = k * exp(total[:, -1:] - total)[:, :, None]
    state = state * exp(total[:, -1])[:, None, None] + matmul(decayed.swapaxes(1, 2), written)
    return np.ascontiguousarray(y.swapaxes(0, 1)), np.asarray(state, np.float32)


def _solve_triangular(lower: F32, target: F32) -> F32:
    """Solve w + lower w = target for w, row by row; lower [H, L, L] strictly lower triangular, target [H, L, V]."""
    out = target.copy()
    for i in range(1, out.shape[1]):
        out[:, i] -= matmul(lower[:, i : i + 1, :i], out[:, :i])[:, 0]
    return out


def _in_chunks(scan: Callable[[F32, slice], tuple[F32, F32]], state: F32, tokens: int, chunk: int) -> tuple[F32, F32]:
    """Apply a scan (state, tokens) -> (y, state) chunk by chunk; return all y and the last state. chunk: 0 for a
    suitable size."""
    parts, chunk = [], chunk or _chunk_size(state)
    for start in range(0, tokens, chunk):
        y, state = scan(state, slice(start, start + chunk))
        parts.append(y)
    return np.concatenate(parts), state


def _chunk_size(state: F32) -> int:
    """Return the chunk size up to which no product with a head's state is multithreaded."""
    return int(min(_LONGEST, max(8, _LEAST_SHARED // (state.shape[1] * state.shape[2]))))


def _decays(total: F32) -> F32:
    """Return the decay matrix [H, L, L] from cumulative logs [H, L]: the factor from position s to l for s <= l, else
    0."""
    causal = np.tri(total.shape[1], dtype=bool)
    return exp(np.where(causal, total[:, :, None] - total[:, None, :], np.float32(-np.inf)))
