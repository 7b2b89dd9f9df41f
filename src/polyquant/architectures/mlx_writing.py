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
from polyquant.architectures.mlx import mlx_names
from polyquant.architectures.record import Architecture
from polyquant.operations import (
    AddConstant,
    Chain,
    Concat,
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
_FUSED = (  # ends of transformers' names, that of mlx-lm's stack, and whether transformers has [experts, in, out]
    (".block_sparse_moe.input_linear.weight", ".block_sparse_moe.output_linear.weight", ".block_sparse_moe.switch_mlp",
     False),
    (".feed_forward.experts.gate_up_proj", ".feed_forward.experts.down_proj", ".feed_forward.experts", True),
    (".mlp.experts.gate_up_proj", ".mlp.experts.down_proj", ".mlp.switch_mlp", False),
    (".experts.gate_up_proj", ".experts.down_proj", ".experts.switch_glu", False),
)  # fmt: skip
_NUMBERED = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_WITHOUT_GATE = {"up_proj": "fc1", "down_proj": "fc2"}


def mlx_layout(tensors: Sequence[TensorMap], config: Mapping[str, Any]) -> tuple[TensorMap, ...]:
    """The tensors with mlx-lm's names and layouts; unchanged for models that are not mixtures of separate experts."""
    record = of_config(config)
    if record is None or not record.has_experts:
        return tuple(tensors)
    if record.name == "gpt-oss":
        return tuple(part for tensor in tensors for part in _of_gpt_oss(tensor))
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


def _of_gpt_oss(tensor: TensorMap) -> list[TensorMap]:
    """Gate and up as two stacks [experts, out, in] from rows that alternate, floats [experts, in, out] or MXFP4 blocks;
    other tensors unchanged.
    """
    stem, _, last = tensor.target.rpartition(".experts.")
    part, _, kind = last.partition("_proj")
    if not stem or part not in ("gate_up", "down") or kind not in ("", "_blocks", "_bias"):
        return [tensor]
    suffix = "bias" if kind == "_bias" else "weight"
    parts = ("down",) if part == "down" else ("gate", "up")
    return _apart(tensor, [f"{stem}.experts.{p}_proj.{suffix}" for p in parts], alternate=True, transposed=not kind)


def _of_fused(tensor: TensorMap, record: Architecture) -> list[TensorMap]:
    """Gate and up as two stacks, and down as a stack, if mlx-lm has them; other tensors unchanged."""
    for joined, down, stack, transposed in _FUSED if len(tensor.shape) == 3 else ():
        parts = ("gate", "up") if tensor.target.endswith(joined) else ("down",)
        if not tensor.target.endswith((joined, down)):
            continue
        stem = tensor.target.removesuffix(joined).removesuffix(down)
        names = [f"{stem}{stack}.{part}_proj.weight" for part in parts]
        if len(mlx_names(names, record)) == len(names):
            return _apart(tensor, names, alternate=False, transposed=transposed)
    return [tensor]


def _apart(tensor: TensorMap, names: Sequence[str], *, alternate: bool, transposed: bool) -> list[TensorMap]:
    """The stacks with these names: the whole tensor, or its two halves along the outputs.

    alternate: their rows alternate. transposed: [experts, in, out] becomes [experts, out, in].
    """
    steps = tensor.op.steps if isinstance(tensor.op, Chain) else () if isinstance(tensor.op, Same) else (tensor.op,)
    shape = tensor.shape
    if transposed:
        shape = (*shape[:-2], shape[-1], shape[-2])
        steps = steps[:-1] if steps and steps[-1] == Transpose() else (*steps, Transpose())
    if len(names) == 1:
        return [replace(tensor, target=names[0], shape=shape, op=chain(*steps))]
    joined: Operation = Interleave(1) if alternate else Concat(1)
    half, out = shape[1] // 2, list[TensorMap]()
    for i, name in enumerate(names):
        sources = tensor.sources
        if steps and steps[0] == joined and len(sources) == 2:
            sources, op = sources[i : i + 1], chain(*steps[1:])
        else:
            piece = Slice(i, shape[1], 2, 1) if alternate else Slice(i * half, (i + 1) * half, 1, 1)
            op = chain(*steps, piece)
        out.append(replace(tensor, target=name, sources=sources, shape=(shape[0], half, *shape[2:]), op=op))
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
