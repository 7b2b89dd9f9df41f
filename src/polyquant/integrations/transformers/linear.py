"""A linear layer with a packed weight: torch's tensors and our kernel share memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from polyquant.codecs.trellis import Trellis
from polyquant.errors import UnsupportedError
from polyquant.rows import in_memory
from polyquant.runtime.linear import Linear
from polyquant.runtime.load import Activations
from polyquant.types import Rounding, Weight

__all__ = ["PackedWeight", "TrellisLinear", "cpu_only"]

_DTYPES = {"uint8": torch.uint8, "float32": torch.float32}
_ROUNDING: dict[Activations, Rounding] = {"float": "none", "int8": "block"}


def cpu_only(device: object) -> UnsupportedError:
    """Return the error for any other device."""
    return UnsupportedError(
        "packed trellis weights run on the CPU",
        expected="device cpu",
        found=device,
        hint="load with quantization_config=TrellisConfig(dequantize=True) to use another device",
    )


class PackedWeight(torch.nn.Module):
    """The components of a weight [N, K] as buffers, named as in the file: indices, scales, su, sv, and optionally
    lut."""

    def __init__(self, name: str, shape: tuple[int, int], codec: Trellis, rounding: Rounding) -> None:
        super().__init__()
        self.name, self.shape, self.codec, self.rounding = name, torch.Size(shape), codec, rounding
        for part, spec in codec.specs(shape).items():
            self.register_buffer(part, torch.empty(spec.shape, dtype=_DTYPES[spec.dtype.name]))
        self._kernel: tuple[tuple[int, ...], Linear] | None = None

    @property
    def device(self) -> torch.device:
        """The device of the components."""
        return self.get_buffer("indices").device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the decoded weight."""
        return torch.float32

    def extra_repr(self) -> str:
        """Return the description for print(model)."""
        return f"{list(self.shape)}, {self.codec.name}"

    def weight(self) -> Weight:
        """Return the components as a polyquant weight: views, no copies. Raises UnsupportedError if not on the CPU."""
        if self.device.type != "cpu":
            raise cpu_only(self.device)
        arrays = in_memory({part: buffer.numpy() for part, buffer in self.named_buffers()})
        return Weight(self.name, tuple(self.shape), self.codec, arrays)

    def dequantize(self) -> torch.Tensor:
        """Return the weight as float32 [N, K]."""
        return torch.from_numpy(self.weight().dequantize())

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply x [..., K] of any float dtype -> [..., N] of the same, computed in float32."""
        n, k = self.shape
        if x.device.type != "cpu":
            raise cpu_only(x.device)
        if x.numel() == 0:
            return x.new_empty((*x.shape[:-1], n))
        tokens = x.detach().reshape(-1, k).to(torch.float32).contiguous()
        y = torch.from_numpy(np.ascontiguousarray(self._linear()(tokens.numpy())[0]))
        return y.to(x.dtype).reshape(*x.shape[:-1], n)

    def _linear(self) -> Linear:
        """Return the linear, recreated if a buffer was replaced."""
        addresses = tuple(buffer.data_ptr() for buffer in self.buffers())
        if self._kernel is None or self._kernel[0] != addresses:
            self._kernel = addresses, Linear([self.weight()], [None], self.rounding)
        return self._kernel[1]

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> PackedWeight:
        """Move, but never cast: codes are not floats, and scales in half precision would change the model."""
        for part, old in list(self.named_buffers()):
            new = fn(old)
            if new.device.type not in ("cpu", "meta"):
                raise cpu_only(new.device)
            if new.device != old.device:
                self._buffers[part] = new.to(old.dtype)
        return self

    def __deepcopy__(self, memo: Any) -> PackedWeight:
        copy = PackedWeight(self.name, tuple(self.shape), self.codec, self.rounding)
        for part, buffer in self.named_buffers():
            copy._buffers[part] = buffer.clone()
        memo[id(self)] = copy
        return copy


class _Multiply(torch.autograd.Function):
    """x times a packed weight; the gradient of x uses the dequantized weight, the weight has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
        ctx.weight = weight
        return weight.multiply(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return (gradient.to(torch.float32) @ ctx.weight.dequantize()).to(gradient.dtype), None


class TrellisLinear(torch.nn.Module):
    """Replaces torch.nn.Linear; its weight is a module, so its tensors keep their names in the file."""

    def __init__(
        self,
        name: str,
        shape: tuple[int, int],
        bias: torch.nn.Parameter | None,
        codec: Trellis,
        activations: Activations,
    ) -> None:
        """shape: (outputs, inputs)."""
        super().__init__()
        self.out_features, self.in_features = shape
        self.weight = PackedWeight(name, shape, codec, _ROUNDING[activations])
        self.bias = bias

    def extra_repr(self) -> str:
        """Return the description for print(model)."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute x [..., in_features] -> [..., out_features]."""
        y = _Multiply.apply(x, self.weight)
        return y if self.bias is None else y + self.bias
