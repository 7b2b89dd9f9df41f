"""RMS and layer norms, including those of smoothed msModelSlim folders: with a bias, and with a second weight
`module.weight` for the quantized layers that follow.

The specification keeps the float model's norm in `.weight`, for layers that fall back to floats; the tool itself writes
the smoothed norm to both.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from polyquant.architectures.parts import NormKind
from polyquant.errors import UnsupportedError
from polyquant.ops.decoder import add_bias, layer_norm, rms_norm
from polyquant.runtime.tensors import Tensors
from polyquant.types import F32, Floats

__all__ = ["Norm", "bare_norm", "read_norm"]


class Norm:
    """x / rms(x) * weight + bias, or the same of x - mean(x); weight, bias float32 [n], bias None for 0."""

    def __init__(self, weight: F32, eps: float, bias: F32 | None = None, kind: NormKind = "rms") -> None:
        self.weight, self.eps, self.bias, self.kind = weight, eps, bias, kind

    def __call__(self, x: F32) -> F32:
        """Apply the norm: [..., n] -> [..., n]; [T, n] with a bias."""
        if self.kind == "layer":
            return layer_norm(x, self.weight, self.bias, self.eps)
        out = rms_norm(x, self.weight, self.eps)
        if self.bias is not None:
            add_bias(out, self.bias)
        return out


def bare_norm(size: int, eps: float, kind: NormKind = "rms") -> Norm:
    """Return a norm without learned weights."""
    return Norm(np.ones(size, np.float32), eps, None, kind)


def read_norm(
    tensors: Tensors, name: str, size: int, eps: float, readers: Sequence[str] = (), kind: NormKind = "rms"
) -> Norm:
    """Read the norm of that name without suffix. readers: the linear layers that read it, which select the plain or the
    module weight.

    Raises InputError if its weight is missing or misshapen, UnsupportedError if quantized and float layers read a norm
    whose two weights differ.
    """
    plain, module = f"{name}.weight", f"{name}.module.weight"
    if module in tensors and not np.array_equal(tensors.vector(plain, size), tensors.vector(module, size)):
        kinds = {
            tensors.checkpoint[tensors.names[f"{r}.weight"]].codec.form is Floats
            for r in readers
            if f"{r}.weight" in tensors
        }
        if len(kinds) > 1:
            raise UnsupportedError(
                "quantized and float layers share a norm with a different weight for each",
                file=tensors.checkpoint.path,
                tensor=tensors.names[module],
            )
        name = name if True in kinds else f"{name}.module"
    bias = tensors.vector(f"{name}.bias", size) if f"{name}.bias" in tensors else None
    return Norm(tensors.vector(f"{name}.weight", size), eps, bias if bias is not None and bias.any() else None, kind)
