"""Transformers' tensors of a mixture of experts as mlx-lm stores them: the inverse of architectures/mlx.py.

    mlp.experts.3.gate_proj.weight      one matrix of the stack mlp.switch_mlp.gate_proj.weight [experts, out, in]
    feed_forward.w1, experts.3.w1       gate_proj; w2 is down_proj, w3 up_proj
    conv1d.weight [n, 1, k]             [n, k, 1]; models with such layers store norms with their offset of 1
    experts.gate_up_proj of gpt-oss     experts.gate_proj.weight and up_proj.weight: its even and odd rows

    experts.gate_up_proj, down_proj     stacks of gate, up and down: halves of the rows (Qwen3.5, Gemma 4, Granite's
                                        input_linear and output_linear), or of the columns (Llama 4)

mlx-lm stacks and splits float experts when it loads a model, but of most architectures not quantized ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from polyquant.architectures.find import of_config
from polyquant.architectures.fused import stacks_of
from polyquant.architectures.mlx import mlx_names
from polyquant.architectures.record import Architecture
from polyquant.operations import AddConstant, Joined, Matrix, Operation, Reshape, Same, Stack, chain
from polyquant.types import TensorMap

__all__ = ["mlx_layout"]

_EXPERT = re.compile(r"(.+)\.experts\.(\d{1,6})\.([^.]+)\.(weight|bias)")
_NUMBERED = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_WITHOUT_GATE = {"up_proj": "fc1", "down_proj": "fc2"}


def mlx_layout(tensors: Sequence[TensorMap], config: Mapping[str, Any]) -> tuple[TensorMap, ...]:
    """The tensors with mlx-lm's names and layouts; unchanged for models that are not mixtures of separate experts."""
    record = of_config(config)
    if record is None or not record.has_experts:
        return tuple(tensors)
    tensors = [part for tensor in tensors for part in _of_fused(tensor, record)]
    stacks: dict[str, dict[int, TensorMap]] = {}
    names = _known(tensors, record)
    for tensor in tensors:
        if tensor.target in names and (found := _EXPERT.fullmatch(tensor.target)) is not None:
            stacks.setdefault(names[tensor.target], {})[int(found[2])] = tensor
    complete = {
        name: [each[i] for i in range(len(each))] for name, each in stacks.items() if set(each) == set(range(len(each)))
    }
    out: dict[str, TensorMap] = {}
    for tensor in tensors:
        name = names.get(tensor.target, tensor.target)
        if name in complete:
            out.setdefault(name, _stacked(name, complete[name]))
        elif name in stacks:
            out[tensor.target] = tensor
        else:
            out[name] = replace(tensor, target=name)
    return _with_exchanged_axes(out, record, config)


def _known(tensors: Iterable[TensorMap], record: Architecture) -> dict[str, str]:
    """transformers' name -> mlx-lm's, of the tensors whose mlx-lm name the architecture has."""
    wanted: dict[str, str] = {}
    for tensor in tensors:
        if (found := _EXPERT.fullmatch(tensor.target)) is not None:
            last = _NUMBERED.get(found[3], found[3])
            wanted[tensor.target] = f"{found[1]}.switch_mlp.{last}.{found[4]}"
        else:
            path, _, suffix = tensor.target.rpartition(".")
            stem, _, last = path.rpartition(".")
            if last in _NUMBERED:
                wanted[tensor.target] = f"{stem}.{_NUMBERED[last]}.{suffix}"
    parts = {name.split(".")[-2] for name in wanted.values() if ".switch_mlp." in name}
    if parts and "gate_proj" not in parts:
        for old, name in wanted.items():
            *front, last, suffix = name.split(".")
            if ".switch_mlp." in name:
                wanted[old] = ".".join([*front, _WITHOUT_GATE.get(last, last), suffix])
    known = mlx_names(set(wanted.values()), record)
    return {old: name for old, name in wanted.items() if name in known}


def _stacked(name: str, experts: Sequence[TensorMap]) -> TensorMap:
    """The stack of the experts' tensors: the source itself if they are its matrices in order."""
    shape = (len(experts), *experts[0].shape)
    first = experts[0]
    if all(t.sources == first.sources and t.op == Matrix(i) for i, t in enumerate(experts)):
        return replace(first, target=name, shape=shape, op=Same())
    sources = tuple(source for t in experts for source in t.sources)
    ops: tuple[Operation, ...] = tuple(t.op for t in experts)
    op: Operation = Stack() if all(isinstance(o, Same) for o in ops) else Joined(ops, Stack())
    return replace(first, target=name, sources=sources, shape=shape, op=op)


def _of_fused(tensor: TensorMap, record: Architecture) -> list[TensorMap]:
    """Gate and up as two stacks, and down as a stack, if mlx-lm has them; other tensors unchanged."""
    fused = record.fused
    if fused is None:
        return [tensor]
    stacks = {f"{stem}.{fused.stacked(part, kind)}": m for stem, part, kind, m in stacks_of(tensor, fused)}
    if not stacks or len(mlx_names(stacks, record)) < len(stacks):
        return [tensor]
    return [replace(stack, target=name) for name, stack in stacks.items()]


def _with_exchanged_axes(
    tensors: Mapping[str, TensorMap], record: Architecture, config: Mapping[str, Any]
) -> tuple[TensorMap, ...]:
    """Kernels [n, k, 1], and in models with kernels norms with their offset."""
    kernels = {name for name, t in tensors.items() if len(t.shape) == 3 and t.shape[1] == 1 and "conv" in name}
    if not kernels:
        return tuple(tensors.values())
    embedding = next((t for t in tensors.values() if record.names.to_gguf(t.target) == "token_embd.weight"), None)
    hyper = record.hyper.read_config(config, vocab=0 if embedding is None else embedding.shape[0], file="config.json")
    out = []
    for name, tensor in tensors.items():
        if name in kernels:
            n, _, k = tensor.shape
            out.append(replace(tensor, shape=(n, k, 1), op=chain(tensor.op, Reshape((n, k, 1)))))
            continue
        target = record.names.to_gguf(name) if len(tensor.shape) == 1 else None
        change = record.change(target) if target is not None else None
        added = change.operation(hyper, tensor.shape) if change is not None else None
        out.append(replace(tensor, op=chain(tensor.op, added)) if isinstance(added, AddConstant) else tensor)
    return tuple(out)
