"""RMS norm of a decoder, with the bias that smoothing by a shift gives it (msModelSlim)."""

from __future__ import annotations

from polyquant.ops.decoder import add_bias, rms_norm
from polyquant.runtime.tensors import Tensors
from polyquant.types import F32

__all__ = ["Norm", "read_norm"]


class Norm:
    """x / rms(x) * weight + bias; weight, bias float32 [n], bias None for 0."""

    def __init__(self, weight: F32, eps: float, bias: F32 | None = None) -> None:
        self.weight, self.eps, self.bias = weight, eps, bias

    def __call__(self, x: F32) -> F32:
        """x [T, n] -> [T, n]."""
        out = rms_norm(x, self.weight, self.eps)
        if self.bias is not None:
            add_bias(out, self.bias)
        return out


def read_norm(tensors: Tensors, name: str, size: int, eps: float) -> Norm:
    """The norm of that name without suffix. Raises InputError if its weight is missing or misshapen."""
    bias = tensors.vector(f"{name}.bias", size) if f"{name}.bias" in tensors else None
    return Norm(tensors.vector(f"{name}.weight", size), eps, bias if bias is not None and bias.any() else None)
