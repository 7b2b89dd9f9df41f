"""Mixtures of experts: transformers stores all experts in two tensors, files have three matrices per expert.

Packed ones stay separate.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from transformers.core_model_loading import Concatenate, MergeModulelist

from polyquant.codecs.trellis import Trellis
from polyquant.errors import UnsupportedError
from polyquant.integrations.transformers.linear import TrellisLinear, float32_rows, refuse_device
from polyquant.integrations.transformers.matching import Renaming
from polyquant.runtime.expert_linear import ExpertLinear, Stack
from polyquant.runtime.load import Activations
from polyquant.types import Rounding, Weight

__all__ = ["ExpertNames", "PackedExperts", "StackedExperts", "expert_names", "packed_experts"]

_PLAIN = {
    "has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True, "has_post_expert_norm": False,
}  # fmt: skip
"""transformers' attributes of plain experts, w2(act(w1 x) * w3 x)."""
_LEAF = re.compile(r"(\d{1,6})\.(\w+)\.weight")


class PackedExperts(torch.nn.Module):
    """Replaces an experts module. Children: expert index -> {matrix: TrellisLinear}, named as in the file.

    matrices: the file's names of (gate, up, down).
    """

    def __init__(self, original: Any, experts: Sequence[Mapping[str, TrellisLinear]], matrices: Sequence[str]) -> None:
        super().__init__()
        keep_attributes(self, original)
        for i, expert in enumerate(experts):
            self.add_module(str(i), torch.nn.ModuleDict(expert))
        self._count, self._matrices, self._kind = len(experts), tuple(matrices), type(original)
        self._empty = (original,)  # on the meta device; the tuple keeps it from becoming a child module

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Compute [tokens, hidden], [tokens, k] expert indices, [tokens, k] weights -> [tokens, hidden]."""
        out = torch.zeros_like(hidden_states)
        for i in torch.unique(top_k_index).tolist():
            if i >= self._count:  # a placeholder
                continue
            gate, up, down = self._of(i)
            token, place = torch.where(top_k_index == i)
            x = hidden_states[token]
            inner = self._kind._apply_gate(self, torch.cat([gate(x), up(x)], -1))
            out.index_add_(0, token, (down(inner) * top_k_weights[token, place, None]).to(out.dtype))
        return out

    def _of(self, i: int) -> list[TrellisLinear]:
        expert: Any = self.get_submodule(str(i))
        return [expert[name] for name in self._matrices]

    def dequantized(self, dtype: torch.dtype | None) -> Any:
        """Return the original module with float weights."""
        module = self._empty[0]
        rows = [[linear.weight.dequantize().to(dtype) for linear in self._of(i)] for i in range(self._count)]
        gate_up = torch.stack([torch.cat(row[:2]) for row in rows])
        module.gate_up_proj = torch.nn.Parameter(gate_up, requires_grad=False)
        module.down_proj = torch.nn.Parameter(torch.stack([row[2] for row in rows]), requires_grad=False)
        return module


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """The stored names of an experts module. matrices: the leaf names of (gate, up, down). tensors: per expert, leaf
    name -> tensor."""

    matrices: tuple[str, ...]
    tensors: Sequence[Mapping[str, str]]


def expert_names(module: Any, path: str, names: Sequence[str], rename: Renaming, file: object) -> ExpertNames:
    """Return the names of all experts. names: the quantized weights that the module would merge.

    Raises UnsupportedError for unsupported experts, and unless all matrices of all experts are quantized.
    """
    patterns = _patterns(module, names, rename)
    if patterns is None:
        raise _refusal("unsupported packed experts", type(module).__name__, names[0], file)
    experts: dict[int, dict[str, str]] = {}
    matrices: dict[str, str] = {}
    for name in names:
        leaf = _LEAF.fullmatch(rename.plain(name).removeprefix(f"{path}."))
        if leaf is None:
            raise _refusal("unexpected name of an expert", rename.plain(name), name, file)
        matrices[rename(name)[1] or ""] = leaf[2]
        experts.setdefault(int(leaf[1]), {})[leaf[2]] = name
    count = module.down_proj.shape[0]
    if sorted(experts) != list(range(count)) or any(len(expert) != 3 for expert in experts.values()):
        complete = sum(len(expert) == 3 for expert in experts.values())
        raise _refusal("some experts are quantized and some are not", f"{complete} of {count} complete", names[0], file)
    return ExpertNames(tuple(matrices[p] for p in patterns), [experts[i] for i in range(count)])


def packed_experts(
    module: Any, names: ExpertNames, codecs: Mapping[str, Trellis], activations: Activations
) -> PackedExperts:
    """Return the counterpart of an experts module with one TrellisLinear per matrix."""
    width, hidden = module.down_proj.shape[2], module.down_proj.shape[1]
    down = names.matrices[2]
    experts = [
        {
            leaf: TrellisLinear(name, (hidden, width) if leaf == down else (width, hidden), None, codecs[name],
                                activations)
            for leaf, name in expert.items()
        }
        for expert in names.tensors
    ]  # fmt: skip
    return PackedExperts(module, experts, names.matrices)


class StackedExperts(torch.nn.Module):
    """Replaces an experts module by stacks of matrices in their stored layout, multiplied by the runtime's kernels."""

    def __init__(self, original: Any, inner: Sequence[Stack], down: Stack, rounding: Rounding) -> None:
        """inner: gate and up, or one stack with the rows of both; a stack is one weight, or one per expert."""
        super().__init__()
        keep_attributes(self, original)
        for name, parameter in original.named_parameters(recurse=False):
            if name.endswith("_bias"):
                self.register_parameter(name, parameter)
        self._kind = type(original)
        self._sample = inner[0] if isinstance(inner[0], Weight) else inner[0][0]
        self._inner = ExpertLinear(inner, [None] * len(inner), rounding)
        self._down = ExpertLinear([down], [None], rounding)

    def extra_repr(self) -> str:
        """Return the description for print(model)."""
        return f"{self._inner.experts} experts of {list(self._sample.shape)}, {self._sample.codec.name}"

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Compute [tokens, hidden], [tokens, k] expert indices, [tokens, k] weights -> [tokens, hidden]."""
        if torch.is_grad_enabled() and hidden_states.requires_grad:
            raise UnsupportedError(
                "packed experts have no gradients", hint="use torch.no_grad(), or load with dequantize=True"
            )
        ids = top_k_index.to(torch.int32).contiguous().numpy()
        chosen = top_k_index.reshape(-1)
        gate_up = torch.cat([torch.from_numpy(y) for y in self._inner(float32_rows(hidden_states), ids)], -1)
        inner = self._kind._apply_gate(self, self._biased(gate_up, "gate_up_proj_bias", chosen))
        (y,) = self._down(float32_rows(inner), ids)
        down = self._biased(torch.from_numpy(y), "down_proj_bias", chosen)
        weighted = down.reshape(*ids.shape, -1) * top_k_weights[..., None].to(torch.float32)
        return weighted.sum(1).to(hidden_states.dtype)

    def _biased(self, y: torch.Tensor, name: str, chosen: torch.Tensor) -> torch.Tensor:
        bias = self._parameters.get(name)
        return y if bias is None else y + bias[chosen].to(y.dtype)

    def _apply(self, fn: Any, recurse: bool = True) -> StackedExperts:
        refuse_device(fn(torch.empty(0)).device)
        super()._apply(fn, recurse)
        return self

    def __deepcopy__(self, memo: Any) -> StackedExperts:
        copy = StackedExperts.__new__(StackedExperts)
        torch.nn.Module.__init__(copy)
        memo[id(self)] = copy
        for key, value in vars(self).items():  # the products are immutable
            copy.__dict__[key] = deepcopy(value, memo) if key in ("_modules", "_parameters", "_buffers") else value
        return copy


def keep_attributes(module: torch.nn.Module, original: Any) -> None:
    """Copy the constants that the original's gate may use, and its children."""
    vars(module).update({k: v for k, v in vars(original).items() if not k.startswith("_")})
    for name, child in original.named_children():
        module.add_module(name, child)


def _patterns(module: Any, names: Sequence[str], rename: Renaming) -> list[str] | None:
    """Return the patterns of gate, up and down; None if the module or its merging is unusual."""
    if any(getattr(module, key, None) != value for key, value in _PLAIN.items()):
        return None
    converters = {id(c): c for name in names if (c := rename.converter(name)) is not None}.values()
    by_length = sorted(converters, key=lambda c: -len(c.source_patterns))
    if [[type(op) for op in c.operations] for c in by_length] != [[MergeModulelist, Concatenate], [MergeModulelist]]:
        return None
    patterns = [p for c in by_length for p in c.source_patterns]
    return patterns if len(patterns) == 3 else None


def _refusal(message: str, found: str, tensor: str, file: object) -> UnsupportedError:
    return UnsupportedError(message, file=file, tensor=tensor, found=found, hint="load with dequantize=True")
