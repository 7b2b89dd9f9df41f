"""Transformers' tensors of a mixture of experts as mlx-lm stores them: the inverse of architectures/mlx.py.

    mlp.experts.3.gate_proj.weight      one matrix of the stack mlp.switch_mlp.gate_proj.weight [experts, out, in]
    feed_forward.w1, experts.3.w1       gate_proj; w2 is down_proj, w3 up_proj
    conv1d.weight [n, 1, k]             [n, k, 1]; models with such layers store norms with their offset of 1
    experts.gate_up_proj of gpt-oss     experts.gate_proj.weight and up_proj.weight: its even and odd rows

mlx-lm stacks float experts when it loads a model, but of most architectures not quantized ones. Other experts that
transformers itself stores as one tensor keep its layout.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from polyquant.architectures.find import of_config
from polyquant.architectures.mlx import mlx_names
from polyquant.architectures.record import Architecture
from polyquant.operations import (
    AddConstant,
    Chain,
    Interleave,
    Joined,
    Matrix,
    Operation,
    Reshape,
    Same,
    Slice,
    Stack,
    Transpose,
    chain,
)
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
    if record.name == "gpt-oss":
        return tuple(part for tensor in tensors for part in _of_gpt_oss(tensor))
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


def _of_gpt_oss(tensor: TensorMap) -> list[TensorMap]:
    """Gate and up as two stacks [experts, out, in] from rows that alternate, floats [experts, in, out] or MXFP4 blocks;
    other tensors unchanged.
    """
    stem, _, last = tensor.target.rpartition(".experts.")
    part, _, kind = last.partition("_proj")
    if not stem or part not in ("gate_up", "down") or kind not in ("", "_blocks", "_bias"):
        return [tensor]
    suffix = "bias" if kind == "_bias" else "weight"
    steps = tensor.op.steps if isinstance(tensor.op, Chain) else () if isinstance(tensor.op, Same) else (tensor.op,)
    shape = tensor.shape
    if not kind:  # transposed, or the transpose of such
        shape = (*shape[:-2], shape[-1], shape[-2])
        steps = steps[:-1] if steps and steps[-1] == Transpose() else (*steps, Transpose())
    if part == "down":
        return [replace(tensor, target=f"{stem}.experts.down_proj.{suffix}", shape=shape, op=chain(*steps))]
    out = []
    half = (shape[0], shape[1] // 2, *shape[2:])
    source: tuple[str, ...]
    for i, name in enumerate(("gate", "up")):
        target = f"{stem}.experts.{name}_proj.{suffix}"
        if steps and steps[0] == Interleave(1) and len(tensor.sources) == 2:
            source, op = (tensor.sources[i],), chain(*steps[1:])
        else:
            source, op = tensor.sources, chain(*steps, Slice(i, shape[1], 2, 1))
        out.append(replace(tensor, target=target, sources=source, shape=half, op=op))
    return out


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
