"""Place the weights of a checkpoint in a model: packed modules for quantized ones, floats for all others.

transformers calls PackedHfQuantizer after it has built the empty model. Names and shapes are compared before any
weight is read.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.pytorch_utils import Conv1D
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from polyquant.architectures.find import of_config, of_metadata
from polyquant.errors import UnsupportedError, printable
from polyquant.integrations.transformers.experts import StackedExperts, expert_names
from polyquant.integrations.transformers.linear import PackedLinear, StoredWeight, packed_embedding
from polyquant.integrations.transformers.matching import Renaming, require_match
from polyquant.integrations.transformers.smoothed import add_biases
from polyquant.integrations.transformers.source import ModelSource
from polyquant.runtime.load import Activations
from polyquant.runtime.ternarize import ternarized
from polyquant.types import Floats, Weight

__all__ = ["METHOD", "PackedHfQuantizer", "Placing"]

METHOD = "polyquant"
_log = logging.getLogger("polyquant")
_LINEARS = ("Linear", "FalconLinear")
"""Classes that compute x W^T + bias."""
_MERGED = (".gate_up_proj", ".down_proj")
_DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


class Placing:
    """The tensors to load, and the result. state: the floats that transformers loads, filled by the quantizer. decoded:
    quantized tensors that the model needs as floats. packed: the number of packed tensors."""

    def __init__(self, source: ModelSource, state: dict[str, torch.Tensor], *, dequantize: bool) -> None:
        self.source, self.state, self.dequantize = source, state, dequantize
        self.decoded: list[str] = []
        self.packed = 0

    def __deepcopy__(self, memo: Any) -> Placing:
        return self  # transformers copies its configurations repeatedly


@register_quantization_config(METHOD)
class PackedConfig(QuantizationConfigMixin):
    """The configuration that connects a model with its tensors; made by load_model only."""

    def __init__(self, placing: Placing | None = None, activations: Activations = "float", **_: Any) -> None:
        self.quant_method = METHOD
        self.placing, self.activations = placing, activations

    def to_dict(self) -> dict[str, Any]:
        """Return the printable entries."""
        return {"quant_method": METHOD, "activations": self.activations}


@register_quantizer(METHOD)
class PackedHfQuantizer(HfQuantizer):
    """Replaces modules by packed ones, and supplies all other tensors as floats."""

    requires_calibration = False

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> None:
        placing = self.quantization_config.placing
        if placing is None:
            raise UnsupportedError(
                "this configuration has no tensors", hint="load the file with polyquant.hf.load_model"
            )
        conversions = get_model_conversion_mapping(model)
        shapes = placing.source.shapes
        if placing.source.checkpoint.describes_itself:
            add_biases(model, shapes)
        require_match(model, conversions, shapes, placing.source.checkpoint.path)
        _Placer(model, placing, Renaming(model, conversions), self.quantization_config.activations).place()

    def is_serializable(self) -> bool:
        """False: transformers has no format for these codecs."""
        return False

    @property
    def is_trainable(self) -> bool:
        """False: codes have no gradient."""
        return False


class _Placer:
    """Distributes the tensors of one model."""

    def __init__(self, model: Any, placing: Placing, rename: Renaming, activations: Activations) -> None:
        self.model, self.placing, self.source, self.rename = model, placing, placing.source, rename
        self.rounding = self.source.rounding(activations)
        self.file = self.source.checkpoint.path
        checkpoint = self.source.checkpoint
        gguf = checkpoint.naming == "gguf"
        self.record = of_metadata(checkpoint.metadata) if gguf else of_config(checkpoint.config)

    def place(self) -> None:
        """Place all tensors."""
        experts: dict[str, list[str]] = {}
        merged: dict[str, dict[str, str]] = {}
        tables: dict[str, Weight] = {}
        for name in self.source.shapes:
            target, pattern = self.rename(name)
            if target not in self.rename.wanted:
                continue  # declared as ignorable by the model
            if self.placing.dequantize or not (self.source.is_packed(name) or self._is_master(name)):
                self._float(name)
            elif pattern is not None:
                experts.setdefault(target.rpartition(".")[0], []).append(name)
            elif target.endswith(_MERGED) and hasattr(
                self.model.get_submodule(target.rpartition(".")[0]), "_apply_gate"
            ):
                merged.setdefault(target.rpartition(".")[0], {})[target.rpartition(".")[2]] = name
            else:
                self._packed(name, target, tables)
        for path, names in experts.items():
            self._experts(path, names)
        for path, by_leaf in merged.items():
            self._merged_experts(path, by_leaf)
        self._tie(tables)

    def _is_master(self, name: str) -> bool:
        """True for a BitNet master weight, which is made ternary."""
        if not self.source.masters or self.record is None or len(self.source.shapes[name]) != 2:
            return False
        stem = (self.record.names.to_gguf(name) or "").removesuffix(".weight").rpartition(".")[2]
        return stem in self.record.linears

    def _float(self, name: str) -> None:
        constant = self.source.constants.get(name)
        if constant is not None:
            self.placing.state[name] = torch.from_numpy(np.array(constant))
            return
        if self.placing.dequantize or not self.source.is_packed(name):
            self.placing.state[name] = float_tensor(self.source.weight(name))
            return
        self.placing.decoded.append(name)
        self.placing.state[name] = torch.from_numpy(self.source.weight(name).dequantize())

    def _packed(self, name: str, target: str, tables: dict[str, Weight]) -> None:
        """Replace the module of a weight by a packed one; keep floats where there is none for it."""
        path, _, leaf = target.rpartition(".")
        module = self.model.get_submodule(path)
        kind = type(module)
        if leaf == "weight" and (kind.__name__ in _LINEARS or kind is Conv1D):
            weight = self.source.transposed(name) if kind is Conv1D else self.source.weight(name)
            if weight is not None and self._is_master(name):
                weight = ternarized(weight, file=self.file)
            if weight is not None and weight.codec.form is not Floats:
                self._replace(path, PackedLinear(StoredWeight(weight, self.rounding), module.bias))
                tables[target] = weight
                return
        if leaf == "weight" and isinstance(module, torch.nn.Embedding):
            weight = self.source.weight(name)
            table = packed_embedding(module, weight)
            if table is not None and weight.codec.form is not Floats:
                self._replace(path, table)
                tables[target] = weight
                return
        self._float(name)

    def _replace(self, path: str, module: torch.nn.Module) -> None:
        self.model.set_submodule(path, module)
        self.placing.packed += 1

    def _experts(self, path: str, names: list[str]) -> None:
        module = self.model.get_submodule(path)
        try:
            found = expert_names(module, path, names, self.rename, self.file)
        except UnsupportedError:
            for name in names:
                self._float(name)
            return
        gate, up, down = ([self.source.weight(expert[leaf]) for expert in found.tensors] for leaf in found.matrices)
        self._replace(path, StackedExperts(module, [gate, up], down, self.rounding))
        self.placing.packed += len(names) - 1

    def _merged_experts(self, path: str, names: Mapping[str, str]) -> None:
        """Replace experts whose gate and up are one tensor in the checkpoint as well."""
        module = self.model.get_submodule(path)
        stacks = [self._stack(names[leaf], module) for leaf in ("gate_up_proj", "down_proj") if leaf in names]
        if len(stacks) < 2 or any(s is None or s.codec.form is Floats for s in stacks):
            for name in names.values():
                self._float(name)
            return
        inner, down = (s for s in stacks if s is not None)
        self._replace(path, StackedExperts(module, [inner], down, self.rounding))
        self.placing.packed += 1

    def _stack(self, name: str, module: Any) -> Weight | None:
        """Return a stack [experts, outputs, inputs], None if the checkpoint does not have it in this order."""
        if getattr(module, "is_transposed", False):
            return self.source.transposed(name)
        return self.source.weight(name)

    def _tie(self, tables: Mapping[str, Weight]) -> None:
        """Tie packed embeddings and heads, which transformers cannot tie."""
        pairs = dict(self.model.all_tied_weights_keys)
        for target, source in list(pairs.items()):
            stored = tables.get(source, tables.get(target))
            if stored is None:
                continue
            del pairs[target]
            for name in {target, source} - set(tables):
                path = name.removesuffix(".weight")
                module = self.model.get_submodule(path)
                tied: torch.nn.Module | None = None
                if isinstance(module, torch.nn.Linear):
                    tied = PackedLinear(StoredWeight(stored, self.rounding), module.bias)
                elif isinstance(module, torch.nn.Embedding):
                    tied = packed_embedding(module, stored)
                if tied is None:
                    raise UnsupportedError(
                        "a packed weight cannot be tied to this module", file=self.file, tensor=name,
                        found=type(module).__name__, hint="load with dequantize=True",
                    )  # fmt: skip
                self.model.set_submodule(path, tied)
        self.model.all_tied_weights_keys = pairs
        if len(pairs) == 0:
            self.model._tied_weights_keys = {}


def float_tensor(weight: Weight) -> torch.Tensor:
    """Return a tensor in its stored dtype if torch has it, otherwise float32."""
    dtype = _DTYPES.get(weight.codec.name)
    if dtype is None:
        return torch.from_numpy(weight.dequantize())
    (stored,) = weight.read().values()
    return torch.from_numpy(stored.reshape(-1).view(np.uint8)).view(dtype).reshape(weight.shape)


def report(placing: Placing, model: Any) -> None:
    """Log quantized tensors that this model needs as floats."""
    if placing.decoded:
        first, count = printable(placing.decoded[0]), len(placing.decoded)
        _log.warning(
            "%d quantized tensors were dequantized, because %s has no packed module for them (first: %s)",
            count, type(model).__name__, first,
        )  # fmt: skip
