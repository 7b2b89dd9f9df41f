"""Linear layers and embeddings with packed weights: our kernels multiply them, or decode the requested rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, cast

import numpy as np
import torch

from polyquant.capabilities import DecodesRows, HoldsBias
from polyquant.codecs.trellis import Trellis
from polyquant.errors import UnsupportedError
from polyquant.rows import in_memory
from polyquant.runtime.ends import Embedding
from polyquant.runtime.linear import Linear
from polyquant.runtime.load import Activations
from polyquant.types import F32, Rounding, Weight

__all__ = [
    "DEVICE_CHOICES", "HeldWeight", "PackedLinear", "PackedWeight", "StoredWeight", "TrellisLinear", "cpu_only",
    "float32_rows", "on_cpu", "packed_embedding", "refuse_device",
]  # fmt: skip

_DTYPES = {"uint8": torch.uint8, "float32": torch.float32}
_ROUNDING: dict[Activations, Rounding] = {"float": "none", "int8": "block"}
DEVICE_CHOICES = ("auto", "balanced", "balanced_low_0", "sequential")
"""Values of device_map that leave the choice to the loader."""
_Move: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


def cpu_only(device: object) -> UnsupportedError:
    """Return the error for any other device."""
    return UnsupportedError(
        "packed weights run on the CPU",
        expected="device cpu",
        found=device,
        hint="load with dequantize=True to use another device",
    )


def refuse_device(device: torch.device) -> None:
    """Raise UnsupportedError unless packed weights can be on this device."""
    if device.type not in ("cpu", "meta"):
        raise cpu_only(device)


def on_cpu(device_map: Any) -> None:
    """Raise UnsupportedError for a device map that places weights anywhere but on the CPU."""
    places = device_map.values() if isinstance(device_map, Mapping) else [device_map]
    for place in places:
        if place is not None and str(place) not in (*DEVICE_CHOICES, "cpu"):
            raise cpu_only(place)


def float32_rows(x: torch.Tensor) -> F32:
    """Return x [..., K] of any float dtype as float32 [T, K]. Raises UnsupportedError if it is not on the CPU."""
    if x.device.type != "cpu":
        raise cpu_only(x.device)
    rows = x.detach().reshape(-1, x.shape[-1]).to(torch.float32).contiguous()
    return cast("F32", rows.numpy())


class HeldWeight(torch.nn.Module, ABC):
    """A packed weight [N, K] in the place of a parameter."""

    def __init__(self, name: str, shape: tuple[int, ...], rounding: Rounding) -> None:
        super().__init__()
        self.name, self.shape, self.rounding = name, torch.Size(shape), rounding

    @property
    def device(self) -> torch.device:
        """The device of the packed bytes."""
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the decoded weight."""
        return torch.float32

    @abstractmethod
    def weight(self) -> Weight:
        """Return it as a polyquant weight. Raises UnsupportedError if it is not on the CPU."""

    @abstractmethod
    def _linear(self) -> Linear:
        """Return its product."""

    def dequantize(self) -> torch.Tensor:
        """Return the weight as float32 [N, K]."""
        return torch.from_numpy(self.weight().dequantize())

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply x [..., K] of any float dtype -> [..., N] of the same, computed in float32."""
        tokens = float32_rows(x)
        if x.numel() == 0:
            return x.new_empty((*x.shape[:-1], self.shape[0]))
        y = torch.from_numpy(np.ascontiguousarray(self._linear()(tokens)[0]))
        return y.to(x.dtype).reshape(*x.shape[:-1], self.shape[0])


class StoredWeight(HeldWeight):
    """A weight of any codec, in its stored layout: maps of its file, shared by copies of the model."""

    def __init__(self, weight: Weight, rounding: Rounding, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(weight.name, weight.shape, rounding)
        self._stored, self._dtype = weight, dtype
        self._kernel: Linear | None = None
        self._table: Embedding | None = None
        self._is_hf_initialized = True  # else transformers would initialize it randomly

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of decoded rows."""
        return self._dtype

    def extra_repr(self) -> str:
        """Return the description for print(model)."""
        return f"{list(self.shape)}, {self._stored.codec.name}"

    def weight(self) -> Weight:
        """Return the weight."""
        return self._stored

    def _linear(self) -> Linear:
        if self._kernel is None:
            self._kernel = Linear([self._stored], [None], self.rounding)
        return self._kernel

    def look_up(self, ids: torch.Tensor) -> torch.Tensor:
        """Decode the rows of ids [...] -> [..., K]. Raises IndexError for ids out of range."""
        tokens = ids.reshape(-1).numpy().astype(np.int64)
        rows, k = self.shape
        if len(tokens) and not (tokens.min() >= 0 and tokens.max() < rows):
            found = f"{tokens.min()} to {tokens.max()}"
            raise IndexError(f"token ids are out of range: expected 0 to {rows - 1}, found {found}")
        if self._table is None:
            self._table = Embedding(self._stored)
        out = self._table(tokens, 0, np.empty((len(tokens), k), np.float32))
        return torch.from_numpy(out).to(self._dtype).reshape(*ids.shape, k)

    def _apply(self, fn: _Move, recurse: bool = True) -> StoredWeight:
        moved = fn(torch.empty(0, dtype=self._dtype))
        refuse_device(moved.device)
        self._dtype = moved.dtype
        return self

    def __deepcopy__(self, memo: Any) -> StoredWeight:
        memo[id(self)] = copy = StoredWeight(self._stored, self.rounding, self._dtype)
        return copy

    def __reduce__(self) -> Any:
        raise UnsupportedError(
            "packed weights are maps of a file and cannot be pickled",
            tensor=self.name,
            hint="load the model in each process",
        )


class PackedWeight(HeldWeight):
    """The components of a Trellis weight as buffers, named as in the file: indices, scales, su, sv, and optionally
    lut."""

    def __init__(self, name: str, shape: tuple[int, int], codec: Trellis, rounding: Rounding) -> None:
        super().__init__(name, shape, rounding)
        self.codec = codec
        for part, spec in codec.specs(shape).items():
            self.register_buffer(part, torch.empty(spec.shape, dtype=_DTYPES[spec.dtype.name]))
        self._kernel: tuple[tuple[int, ...], Linear] | None = None

    @property
    def device(self) -> torch.device:
        """The device of the components."""
        return self.get_buffer("indices").device

    def extra_repr(self) -> str:
        """Return the description for print(model)."""
        return f"{list(self.shape)}, {self.codec.name}"

    def weight(self) -> Weight:
        """Return the components as a polyquant weight: views, no copies. Raises UnsupportedError if not on the CPU."""
        if self.device.type != "cpu":
            raise cpu_only(self.device)
        arrays = in_memory({part: buffer.numpy() for part, buffer in self.named_buffers()})
        return Weight(self.name, tuple(self.shape), self.codec, arrays)

    def _linear(self) -> Linear:
        """Return the linear, recreated if a buffer was replaced."""
        addresses = tuple(buffer.data_ptr() for buffer in self.buffers())
        if self._kernel is None or self._kernel[0] != addresses:
            self._kernel = addresses, Linear([self.weight()], [None], self.rounding)
        return self._kernel[1]

    def _apply(self, fn: _Move, recurse: bool = True) -> PackedWeight:
        """Move, but never cast: codes are not floats, and scales in half precision would change the model."""
        for part, old in list(self.named_buffers()):
            new = fn(old)
            refuse_device(new.device)
            if new.device != old.device:
                self._buffers[part] = new.to(old.dtype)
        return self

    def __deepcopy__(self, memo: Any) -> PackedWeight:
        copy = PackedWeight(self.name, (self.shape[0], self.shape[1]), self.codec, self.rounding)
        for part, buffer in self.named_buffers():
            copy._buffers[part] = buffer.clone()
        memo[id(self)] = copy
        return copy


class _Multiply(torch.autograd.Function):
    """x times a packed weight; the gradient of x uses the dequantized weight, the weight has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: HeldWeight) -> torch.Tensor:
        ctx.weight = weight
        return weight.multiply(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return (gradient.to(torch.float32) @ ctx.weight.dequantize()).to(gradient.dtype), None


class PackedLinear(torch.nn.Module):
    """Replaces torch.nn.Linear; its weight is a module, so its tensors keep their names in the file."""

    def __init__(self, weight: HeldWeight, bias: torch.nn.Parameter | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight, self.bias = weight, bias

    def extra_repr(self) -> str:
        """Return the description for print(model)."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute x [..., in_features] -> [..., out_features]."""
        y = _Multiply.apply(x, self.weight)
        return y if self.bias is None or self._has_bias(x) else y + self.bias

    def _has_bias(self, x: torch.Tensor) -> bool:
        """True if the product already includes the bias."""
        codec = self.weight.weight().codec
        return isinstance(codec, HoldsBias) and codec.holds_bias(x.numel() // self.in_features, self.weight.rounding)


class TrellisLinear(PackedLinear):
    """A linear layer whose weight is the components of Trellis v3."""

    def __init__(
        self,
        name: str,
        shape: tuple[int, int],
        bias: torch.nn.Parameter | None,
        codec: Trellis,
        activations: Activations,
    ) -> None:
        """shape: (outputs, inputs)."""
        super().__init__(PackedWeight(name, shape, codec, _ROUNDING[activations]), bias)


class _PackedTable(torch.nn.Embedding):
    """An embedding that decodes the requested rows. A subclass of the model's class, so that it keeps its scaling."""

    weight: Any

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Look up ids [...] -> [..., K] in the dtype of the model."""
        return self.weight.look_up(input)


def packed_embedding(original: torch.nn.Embedding, weight: Weight) -> torch.nn.Module | None:
    """Return a packed embedding that replaces the original; None if the codec cannot decode single rows."""
    if not (weight.codec.row_sliced or (isinstance(weight.codec, DecodesRows) and weight.codec.decodes_rows)):
        return None
    kind = type(original)
    name = f"Packed{kind.__name__}"
    bases = (_PackedTable,) if kind is torch.nn.Embedding else (kind, _PackedTable)
    packed: Any = torch.nn.Embedding.__new__(cast("Any", type(name, bases, {})))
    attributes = {key: value for key, value in vars(original).items() if key not in ("_parameters", "_modules")}
    vars(packed).update({**attributes, "_parameters": {}, "_modules": {}})
    packed.weight = StoredWeight(weight, "none", original.weight.dtype)
    return packed
