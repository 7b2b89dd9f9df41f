"""The tensors of a checkpoint by the decoder's names (GGUF's), whichever format they lie in, with their shapes checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from polyquant.errors import InputError
from polyquant.ops.matmul import Rounding
from polyquant.runtime.linear import Linear
from polyquant.types import F32, Checkpoint, Shape, Weight

__all__ = ["Tensors"]


@dataclass(frozen=True, slots=True)
class Tensors:
    """names: decoder's name -> tensor's name in the checkpoint. rounding: of the activations of quantized weights."""

    checkpoint: Checkpoint
    names: dict[str, str]
    rounding: Rounding

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def weight(self, name: str, shape: Shape) -> Weight:
        """The tensor of that name. Raises InputError if it is missing or has another shape."""
        if name not in self.names:
            raise InputError("a tensor that the decoder needs is missing", file=self.checkpoint.path, tensor=name)
        found = self.checkpoint[self.names[name]]
        if found.shape != shape:
            raise InputError(
                "wrong shape for this configuration",
                file=self.checkpoint.path,
                tensor=found.name,
                expected=list(shape),
                found=list(found.shape),
            )
        return found

    def vector(self, name: str, size: int) -> F32:
        """A norm's weight or a bias, float32 [size]."""
        return np.ascontiguousarray(self.weight(name, (size,)).dequantize(), np.float32)

    def linear(self, k: int, outputs: Sequence[tuple[str, int]], *, rounding: Rounding | None = None) -> Linear:
        """Matrices [n, k] that share one input: pairs (name without suffix, n). A `.bias` is added where there is one."""
        weights = [self.weight(f"{name}.weight", (n, k)) for name, n in outputs]
        bias = [self.vector(f"{name}.bias", n) if f"{name}.bias" in self else None for name, n in outputs]
        return Linear(weights, bias, rounding or self.rounding)
