"""y = x W^T + b with W in its stored layout.

A codec that is `Packed` (capabilities.py) provides its own kernel (ops/matmul.py). Ternary weights and Trellis codes
without one are losslessly repacked in memory. Weights of any other codec are dequantized some rows at a time: correct,
but slow; see `Linear.kernel`. Weights with a common input (q, k, v; gate and up) form one Linear, so that the input is
rounded once and the threads synchronize once.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, Literal

import numpy as np

from polyquant.capabilities import DecodesRows, HoldsBias, OwnProduct, Packed, TrellisDialect, claims
from polyquant.codecs.ternary import repacked
from polyquant.ops import native
from polyquant.ops.arithmetic import fast_kernels, is_defined, matmul
from polyquant.ops.decoder import add_bias
from polyquant.ops.matmul import Group, round_activations
from polyquant.runtime import headers_only
from polyquant.types import F32, Floats, Rounding, Ternary, Weight

__all__ = ["Linear", "Reader", "packed_handle"]

_CHUNK = 1 << 20  # weights dequantized at a time
_LARGE_CHUNK = 1 << 22  # with a defined order: a product packs its input once per chunk


class Linear:
    """Weights [N_i, K] with a common input. bias: float32 [N_i] or None, one per weight."""

    def __init__(self, weights: Sequence[Weight], bias: Sequence[F32 | None], rounding: Rounding) -> None:
        if rounding == "block" and all(w.codec.form is Ternary for w in weights):
            rounding = "wide"
        self.weights, self.bias, self.rounding = tuple(weights), tuple(bias), rounding
        self._has_bias = any(b is not None for b in bias)
        self._holders = [w.codec if claims(w.codec, HoldsBias) else None for w in self.weights]  # type: ignore[type-abstract]
        self._groups = _groups(self.weights)

    @property
    def kernel(self) -> Literal["packed", "dequantized"]:
        """The method of the next call."""
        return "packed" if self._groups and fast_kernels() is not None else "dequantized"

    def __call__(self, x: F32) -> Sequence[F32]:
        """Multiply: x [T, K] -> one [T, N_i] per weight."""
        if self._groups and fast_kernels() is not None:
            y: Sequence[F32] = [out for group in self._groups for out in group(x, self.rounding)]
        else:
            y = [_reference(w, x, self.rounding) for w in self.weights]
        if self._has_bias:
            for out, bias, holder in zip(y, self.bias, self._holders, strict=True):
                if bias is not None and (holder is None or not holder.holds_bias(len(x), self.rounding)):
                    add_bias(out, bias)
        return y


class Reader:
    """An identity in front of a matrix that is multiplied in a different form: calibration observes its input under the
    matrix's name."""

    def __init__(self, weight: Weight) -> None:
        self.weights = (weight,)

    def __call__(self, x: F32) -> Sequence[F32]:
        """Return x [T, K] unchanged."""
        return (x,)


def _groups(weights: Sequence[Weight]) -> list[Group]:
    """Group adjacent weights of the same kernel; [] if a weight has no kernel."""
    handles = [packed_handle(w) for w in weights]
    if any(h is None for h in handles):
        return []
    out = []
    for _, run in groupby(range(len(weights)), key=lambda i: type(handles[i])):
        members = list(run)
        out.append(Group([handles[i] for i in members], [weights[i].shape[0] for i in members]))
    return out


def packed_handle(weight: Weight) -> Any | None:
    """Return a native handle on a weight [N, K], in its stored layout or repacked in memory; None without a kernel."""
    if not native.available() or headers_only.active():
        return None
    codec, shape = weight.codec, weight.shape
    handle = codec.packed(weight.parts, shape) if claims(codec, Packed) else None  # type: ignore[type-abstract]
    if handle is None and codec.form is Ternary:
        handle = repacked(codec.unpack(weight.parts, shape))
    if handle is None and isinstance(codec, TrellisDialect) and (own := codec.trellis(shape)) is not weight.codec:
        arranged = own.pack(codec.unpack(weight.parts, shape))  # in memory
        handle = own.packed(arranged, shape) if isinstance(own, Packed) else None
    return handle


def _reference(weight: Weight, x: F32, rounding: Rounding) -> F32:
    """Multiply x [T, K] by one weight [N, K], dequantizing some rows at a time.

    Codecs that round their inputs differently provide their own product.
    """
    if isinstance(weight.codec, OwnProduct) and not (is_defined() and rounding == "none"):
        return np.asarray(weight.codec.multiply(weight.parts, weight.shape, x, rounding), np.float32)
    x = x if weight.codec.form is Floats else round_activations(x, rounding)
    rows, k = weight.shape
    if is_defined() and weight.codec.name == "f32":
        return matmul(x, weight.codec.unpack(weight.parts, weight.shape).values.T)  # without a copy
    y = np.empty((len(x), rows), np.float32)
    codec = weight.codec
    by_rows = codec.row_sliced or (isinstance(codec, DecodesRows) and codec.decodes_rows)
    step = max(1, (_LARGE_CHUNK if is_defined() else _CHUNK) // k) if by_rows else rows
    for a in range(0, rows, step):
        part = weight.dequantize(rows=slice(a, min(a + step, rows))) if step < rows else weight.dequantize()
        y[:, a : a + step] = matmul(x, part.T)
    return y
