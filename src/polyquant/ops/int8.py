"""Integer matrix products of msModelSlim's linear layers: the numpy reference of native/affine/matrix.cpp.

    token     q = clamp(round(x / s), -128, 127), s = max|x| / 127 per token   y = (q W^T - offset * sum q) * s * scale
    fixed     q = clamp(round(x / input_scale + input_offset), -128, 127)        y = (q W^T + quant_bias) * deq_scale

Sums are exact (int32 on hardware: fewer than 2^17 inputs), so all engines agree bit for bit. For group-wise W, q * s is
multiplied in float.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from polyquant.ops import affine, native
from polyquant.types import F32, I8, Activation, Affine

__all__ = ["MOST_COLUMNS", "Inputs", "handle", "inputs_of", "multiply", "quant_bias", "round_fixed", "round_token"]

Inputs: TypeAlias = Literal["floats", "token", "fixed", "mixed"]
"""Input rounding: none, one scale per token, a fixed grid; mixed: fixed for a single token, otherwise token."""
MOST_COLUMNS = 1 << 17


def inputs_of(inputs: Inputs, tokens: int) -> Inputs:
    """Resolve `mixed` for a number of tokens."""
    return inputs if inputs != "mixed" else "fixed" if tokens == 1 else "token"


def round_token(x: F32) -> tuple[F32, F32]:
    """Round x [T, K] to integers [T, K] with scales [T, 1]."""
    with np.errstate(all="ignore"):
        top = np.abs(x).max(1, keepdims=True, initial=0)
        scale = np.where(top == 0, np.float32(1), top / np.float32(127)).astype(np.float32)
        return _clamped(x / scale), scale


def round_fixed(x: F32, scale: F32, offset: F32) -> F32:
    """Round x [..., K] to integers on the grid scale, offset [1]."""
    with np.errstate(all="ignore"):
        return _clamped(x / scale + offset)


def _clamped(x: F32) -> F32:
    return np.asarray(np.clip(np.nan_to_num(np.rint(x), nan=0), -128, 127), np.float32)


def multiply(x: F32, weight: Affine, inputs: Inputs) -> F32:
    """Multiply x [T, K] by a weight [N, K] -> float32 [T, N].

    With a fixed grid, the result includes the bias via quant_bias; otherwise not.
    """
    how = inputs_of(inputs, len(x))
    if how == "fixed":
        assert weight.activation is not None
        return _fixed(x, weight.codes, weight.activation)
    if how == "token" and weight.scale.shape[1] == 1:
        q, s = round_token(x)
        with np.errstate(all="ignore"):
            total = _sums(q, weight.codes) - weight.offset[:, 0].astype(np.float64) * q.sum(
                1, keepdims=True, dtype=np.float64
            )
            return np.asarray(total.astype(np.float32) * s * weight.scale[:, 0], np.float32)
    if how == "token":
        q, s = round_token(x)
        x = q * s
    out = np.empty(weight.codes.shape, np.float32)
    return x @ affine.decode(weight.codes, weight.scale, weight.offset, out, weight.bias).T


def _sums(q: F32, codes: I8) -> NDArray[np.float64]:
    """Return exact sums: sums of fewer than 2^37 products of bytes are exact in float64."""
    return q.astype(np.float64) @ codes.T.astype(np.float64)


def _fixed(x: F32, codes: I8, grid: Activation) -> F32:
    with np.errstate(all="ignore"):
        total = _sums(round_fixed(x, grid.scale, grid.offset), codes) + grid.quant_bias
        return np.asarray(total.astype(np.float32) * grid.deq_scale, np.float32)


def handle(weight: Affine, inputs: Inputs) -> Any | None:
    """Return a native handle for ops.matmul.Group, which keeps the arrays alive; None without native kernels and for
    too many inputs."""
    n, k = weight.codes.shape
    if not native.available() or 0 in (n, k) or (inputs != "floats" and k >= MOST_COLUMNS):
        return None
    grid = weight.activation if inputs in ("fixed", "mixed") else None
    wide = None if grid is None else np.ascontiguousarray(np.broadcast_to(grid.deq_scale, (n,)))
    return native.module().affine(
        np.ascontiguousarray(weight.codes), np.ascontiguousarray(weight.scale),
        np.ascontiguousarray(weight.offset) if weight.offset.any() else None,
        inputs, 0.0 if grid is None else float(grid.scale[0]), 0.0 if grid is None else float(grid.offset[0]), wide,
        None if grid is None else np.ascontiguousarray(grid.quant_bias),
    )  # fmt: skip


def quant_bias(bias: F32 | None, deq_scale: F32, input_offset: F32, sums: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return round(bias / deq_scale - input_offset * sums) before int32 saturation, float64 [n]; NaN or infinity for an
    invalid deq_scale.

    bias [n] or None, deq_scale [n] or [1], input_offset [1], sums [n]: row sums of the codes.
    """
    own = np.zeros(len(sums), np.float32) if bias is None else bias
    with np.errstate(all="ignore"):
        return np.rint(own.astype(np.float64) / deq_scale.astype(np.float64) - input_offset.astype(np.float64) * sums)
