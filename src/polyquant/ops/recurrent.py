"""What recurrent parts of a layer do between their matrices, in numpy, float32: causal convolutions, the scan of Mamba-2, the gated delta rule.

A scan takes the state before the first token and gives the one after the last. `..._steps` goes token by token, as it is defined; the scan itself takes
some tokens at a time: what they do to each other is matrices, and only the state goes from chunk to chunk.

State space (Dao and Gu 2024, section 6; h heads, P numbers and N states of each; B and C are shared by the heads of a group):

    S_t = exp(dt_t a) S_t-1 + dt_t x_t B_t^T    y_t = S_t C_t

Gated delta rule (Yang, Kautz and Hatamizadeh 2024; K numbers of a key, V of a value; chunks by the UT transform of their section 3.3):

    S_t = exp(g_t) S_t-1 + k_t (beta_t (v_t - (exp(g_t) S_t-1)^T k_t))^T    y_t = S_t^T q_t
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

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
"""OpenBLAS shares larger products among its threads: ten to two hundred times slower for many small ones where other work has the processors (measured)."""


def sigmoid(x: F32) -> F32:
    """1 / (1 + exp(-x))."""
    with np.errstate(over="ignore"):
        return np.asarray(1 / (1 + np.exp(-x)), np.float32)


def silu(x: F32) -> F32:
    """x / (1 + exp(-x))."""
    return x * sigmoid(x)


def softplus(x: F32) -> F32:
    """ln(1 + exp(x)) without overflow."""
    return np.asarray(np.logaddexp(x, np.float32(0)), np.float32)


def unit(x: F32, eps: float = 1e-6) -> F32:
    """x / sqrt(sum of x^2 + eps) over the last axis."""
    return np.asarray(x / np.sqrt(np.square(x).sum(-1, keepdims=True) + np.float32(eps)), np.float32)


def convolve(window: F32, x: F32, kernel: F32, bias: F32 | None) -> tuple[F32, F32]:
    """Each channel by itself, over its own position and those before: window [k - 1, C] inputs before x [T, C], kernel [C, k], its last column for the position
    itself, bias [C] -> (y [T, C], the window after x)."""
    span, tokens = kernel.shape[1], len(x)
    whole = np.concatenate([window, x])  # [k - 1 + T, C]
    y = whole[:tokens] * kernel[:, 0]
    for j in range(1, span):
        y += whole[j : j + tokens] * kernel[:, j]
    return (y if bias is None else y + bias), whole[tokens:].copy()


def state_space_steps(state: F32, x: F32, dt: F32, a: F32, b: F32, c: F32) -> tuple[F32, F32]:
    """state [H, P, N], x [T, H, P], dt [T, H], a [H] < 0, b, c [T, G, N] -> (y [T, H, P], state)."""
    each = x.shape[1] // b.shape[1]
    y = np.empty_like(x)
    for t in range(len(x)):
        forgotten = np.exp(dt[t] * a)[:, None, None]
        added = (x[t] * dt[t][:, None])[:, :, None] * b[t].repeat(each, 0)[:, None]
        state = state * forgotten + added
        y[t] = (state @ c[t].repeat(each, 0)[:, :, None])[:, :, 0]
    return y, state


def state_space(state: F32, x: F32, dt: F32, a: F32, b: F32, c: F32, *, chunk: int = 0) -> tuple[F32, F32]:
    """`state_space_steps`, `chunk` tokens at a time, 0 for as many as suit the state."""
    if len(x) == 1:
        return state_space_steps(state, x, dt, a, b, c)
    return _in_chunks(lambda s, at: _state_space_chunk(s, x[at], dt[at], a, b[at], c[at]), state, len(x), chunk)


def _state_space_chunk(state: F32, x: F32, dt: F32, a: F32, b: F32, c: F32) -> tuple[F32, F32]:
    (tokens, heads, size), groups = x.shape, b.shape[1]
    total = np.cumsum(dt * a, axis=0).T  # [H, L]: the log of what is left of a state from before the chunk
    keys, queries = b.swapaxes(0, 1), c.swapaxes(0, 1)  # [G, L, N]
    inner = (x * dt[:, :, None]).swapaxes(0, 1)  # [H, L, P]
    mixed = (queries @ keys.swapaxes(1, 2))[:, None] * _left(total).reshape(groups, -1, tokens, tokens)
    y = mixed.reshape(heads, tokens, tokens) @ inner
    grouped = state.reshape(groups, -1, size, state.shape[2])
    before = (queries[:, None] @ grouped.swapaxes(2, 3)).reshape(heads, tokens, size)
    y += before * np.exp(total)[:, :, None]
    kept = inner * np.exp(total[:, -1:] - total)[:, :, None]
    added = kept.reshape(groups, -1, tokens, size).swapaxes(2, 3) @ keys[:, None]
    state = state * np.exp(total[:, -1])[:, None, None] + added.reshape(state.shape)
    return np.ascontiguousarray(y.swapaxes(0, 1)), np.asarray(state, np.float32)


def delta_rule_steps(state: F32, q: F32, k: F32, v: F32, g: F32, beta: F32) -> tuple[F32, F32]:
    """state [H, K, V], q, k [T, H, K], v [T, H, V], g <= 0 and beta [T, H] -> (y [T, H, V], state)."""
    y = np.empty_like(v)
    for t in range(len(v)):
        state = state * np.exp(g[t])[:, None, None]
        said = (k[t][:, None] @ state)[:, 0]
        state = state + k[t][:, :, None] * ((v[t] - said) * beta[t][:, None])[:, None]
        y[t] = (q[t][:, None] @ state)[:, 0]
    return y, state


def delta_rule(state: F32, q: F32, k: F32, v: F32, g: F32, beta: F32, *, chunk: int = 0) -> tuple[F32, F32]:
    """`delta_rule_steps`, `chunk` tokens at a time, 0 for as many as suit the state."""
    if len(v) == 1:
        return delta_rule_steps(state, q, k, v, g, beta)
    return _in_chunks(lambda s, at: _delta_rule_chunk(s, q[at], k[at], v[at], g[at], beta[at]), state, len(v), chunk)


def _delta_rule_chunk(state: F32, q: F32, k: F32, v: F32, g: F32, beta: F32) -> tuple[F32, F32]:
    """What a token writes depends on what those before it in the chunk wrote: a triangular system for each head."""
    q, k, v = (x.swapaxes(0, 1) for x in (q, k, v))  # [H, L, ...]
    total, rate = np.cumsum(g, axis=0).T, beta.T[:, :, None]  # [H, L], [H, L, 1]
    left, turned = _left(total), k.swapaxes(1, 2)
    system = np.asarray(np.tril((k * rate) @ turned * left, -1), np.float32)
    grown = np.exp(total)[:, :, None]
    wanted = rate * (v - grown * (k @ state))
    written = _solved(system, wanted)
    y = grown * (q @ state) + ((q @ turned) * left) @ written
    kept = k * np.exp(total[:, -1:] - total)[:, :, None]
    state = state * np.exp(total[:, -1])[:, None, None] + kept.swapaxes(1, 2) @ written
    return np.ascontiguousarray(y.swapaxes(0, 1)), np.asarray(state, np.float32)


def _solved(lower: F32, wanted: F32) -> F32:
    """w with w + lower w = wanted; lower [H, L, L] strictly, wanted [H, L, V]: row by row."""
    out = wanted.copy()
    for i in range(1, out.shape[1]):
        out[:, i] -= (lower[:, i : i + 1, :i] @ out[:, :i])[:, 0]
    return out


def _in_chunks(scan: Callable[[F32, slice], tuple[F32, F32]], state: F32, tokens: int, chunk: int) -> tuple[F32, F32]:
    """(state, some tokens) -> (y, state), one chunk after the other: all y and the last state. chunk: 0 for as many tokens as suit the state."""
    parts, chunk = [], chunk or _suiting(state)
    for start in range(0, tokens, chunk):
        y, state = scan(state, slice(start, start + chunk))
        parts.append(y)
    return np.concatenate(parts), state


def _suiting(state: F32) -> int:
    """So many tokens that no product of theirs with a head's state is shared among threads."""
    return int(min(_LONGEST, max(8, _LEAST_SHARED // (state.shape[1] * state.shape[2]))))


def _left(total: F32) -> F32:
    """[H, L] sums of logs -> [H, L, L]: what is left at position l of what came in at s <= l, 0 for others."""
    seen = np.tri(total.shape[1], dtype=bool)
    return np.exp(np.where(seen, total[:, :, None] - total[:, None, :], np.float32(-np.inf)))
