"""A linear layer of vLLM with Trellis weights: on the CPU our kernel multiplies them packed; on another device they are
dequantized after loading, and torch multiplies.

The kernel is a custom operator, because vLLM compiles models with torch.compile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from vllm.model_executor.layers.linear import LinearMethodBase

from polyquant.codecs.trellis import Trellis
from polyquant.errors import InputError, UnsupportedError
from polyquant.rows import in_memory
from polyquant.runtime.linear import Linear
from polyquant.types import Weight

__all__ = ["TrellisLinearMethod"]

_DTYPES = {"uint8": torch.uint8, "float32": torch.float32}
_SHARDS = ("q", "k", "v")
"""vLLM's names of the members of a fused layer of queries, keys and values; those of others are numbers."""
_numbers = count()
_linears: WeakValueDictionary[int, Linear] = WeakValueDictionary()


class TrellisLinearMethod(LinearMethodBase):
    """codecs: weight -> codec of the matrices of one layer, in the order of their outputs."""

    def __init__(self, codecs: Mapping[str, Trellis], file: object = None) -> None:
        self.codecs, self.file = codecs, file

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register the components as parameters `weight.indices`, ..., filled by their loaders.

        Raises UnsupportedError for tensor parallelism.
        """
        if input_size_per_partition != input_size or sum(output_partition_sizes) != output_size:
            raise UnsupportedError(
                "Trellis weights are rotated as a whole and cannot be split over devices", file=self.file,
                tensor=next(iter(self.codecs)), hint="set tensor_parallel_size to 1",
            )  # fmt: skip
        sizes = output_partition_sizes if len(self.codecs) > 1 else [output_size]
        if len(sizes) != len(self.codecs):
            raise InputError(
                "a fused layer has other matrices than the folder", file=self.file, tensor=next(iter(self.codecs)),
                expected=f"{len(sizes)} matrices", found=len(self.codecs),
            )  # fmt: skip
        layer.weight = _Components([(n, input_size) for n in sizes], list(self.codecs), list(self.codecs.values()))
        layer.polyquant_dtype = params_dtype

    def process_weights_after_loading(self, layer: Any) -> None:
        """Make the product, or dequantize for a device other than the CPU. Raises InputError for missing components."""
        components = layer.weight
        if not isinstance(components, _Components) or hasattr(layer, "polyquant_linear"):
            return  # called again
        weights = components.weights(self.file)
        if components.device.type == "cpu":
            layer.polyquant_linear = Linear(weights, [None] * len(weights), "none")
            layer.polyquant_number = next(_numbers)
            _linears[layer.polyquant_number] = layer.polyquant_linear
            components.release()
            return
        floats = _floats(weights, layer.polyquant_dtype, components.device)
        del layer.weight
        layer.register_parameter("weight", torch.nn.Parameter(floats, requires_grad=False))

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply x [..., K] -> [..., N]."""
        if not isinstance(layer.weight, _Components):
            return torch.nn.functional.linear(x, layer.weight, bias)
        y: torch.Tensor = torch.ops.polyquant.trellis_linear(x, layer.polyquant_number, layer.weight.outputs)
        return y if bias is None else y + bias

    def dequantize_weight(self, layer: Any) -> torch.Tensor:
        """Return the weight as floats, for vLLM's requantization."""
        if not isinstance(layer.weight, _Components):
            return layer.weight
        return _floats(layer.polyquant_linear.weights, layer.polyquant_dtype, torch.device("cpu"))


class _Components(torch.nn.Module):
    """The parameters indices, scales, su, sv of one layer; each matrix of a fused layer is loaded separately."""

    def __init__(self, shapes: Sequence[tuple[int, int]], names: Sequence[str], codecs: Sequence[Trellis]) -> None:
        super().__init__()
        self.shapes, self.names, self.codecs = list(shapes), list(names), list(codecs)
        self.outputs = sum(n for n, _ in shapes)
        self.loaded: list[dict[str, torch.Tensor]] = [{} for _ in names]
        self.specs = [codec.specs(shape) for codec, shape in zip(codecs, shapes, strict=True)]
        for part, spec in {part: spec for specs in self.specs for part, spec in specs.items()}.items():
            parameter = torch.nn.Parameter(torch.empty(0, dtype=_DTYPES[spec.dtype.name]), requires_grad=False)
            parameter.weight_loader = self._loader(part)
            self.register_parameter(part, parameter)

    @property
    def device(self) -> torch.device:
        """The device of the layer."""
        return self.get_parameter("indices").device

    def _loader(self, part: str) -> Any:
        def load(_: torch.nn.Parameter, tensor: torch.Tensor, shard: str | int | None = None) -> None:
            at = 0 if shard is None else _SHARDS.index(shard) if isinstance(shard, str) else shard
            if shard is None and len(self.names) > 1:
                raise InputError("a fused weight for a layer with several matrices", tensor=self.names[0])
            spec = self.specs[at].get(part)
            if spec is None or tuple(tensor.shape) != spec.shape:
                raise InputError(
                    "a component does not fit the model", tensor=f"{self.names[at]}.{part}",
                    expected="none" if spec is None else list(spec.shape), found=list(tensor.shape),
                )  # fmt: skip
            self.loaded[at][part] = tensor.detach().to("cpu", _DTYPES[spec.dtype.name]).contiguous().clone()

        return load

    def weights(self, file: object) -> list[Weight]:
        """Return the matrices. Raises InputError for a missing component."""
        for name, specs, parts in zip(self.names, self.specs, self.loaded, strict=True):
            for part in specs:
                if part not in parts:
                    raise InputError("a component is missing", file=file, tensor=f"{name}.{part}")
        return [
            Weight(name, shape, codec, in_memory({part: tensor.numpy() for part, tensor in parts.items()}))
            for name, shape, codec, parts in zip(self.names, self.shapes, self.codecs, self.loaded, strict=True)
        ]

    def release(self) -> None:
        """Forget the loaded tensors, which the product holds."""
        self.loaded = []


def _floats(weights: Sequence[Weight], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.cat([torch.from_numpy(w.dequantize()).to(device, dtype) for w in weights])


@torch.library.custom_op("polyquant::trellis_linear", mutates_args=())
def _trellis_linear(x: torch.Tensor, number: int, outputs: int) -> torch.Tensor:
    """Multiply x [..., K] by the matrices of a layer -> [..., outputs]."""
    rows = x.detach().reshape(-1, x.shape[-1]).to(torch.float32).contiguous().numpy()
    if not len(rows):
        return x.new_empty((*x.shape[:-1], outputs))
    y = torch.cat([torch.from_numpy(np.ascontiguousarray(part)) for part in _linears[number](rows)], -1)
    return y.to(x.dtype).reshape(*x.shape[:-1], outputs)


@_trellis_linear.register_fake
def _(x: torch.Tensor, number: int, outputs: int) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], outputs))
