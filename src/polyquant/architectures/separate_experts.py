"""Fused experts as quantized checkpoints for vLLM and SGLang store them: one matrix per expert, under its own name.

    experts.gate_up_proj [experts, 2 * width, hidden]   experts.3.gate_proj.weight and experts.3.up_proj.weight
    experts.gate_up_proj_bias [experts, 2 * width]      experts.3.gate_proj.bias, experts.3.up_proj.bias

Kernels and formats of quantized layers expect two dimensions, so tools like llm-compressor split the experts of each
family before they quantize, and the loaders read these names: load_weights in vllm/model_executor/models/gemma4.py,
qwen3_5.py, llama4.py and granitemoe.py (which has Mixtral's names w1, w2, w3).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from polyquant.architectures.find import of_config
from polyquant.architectures.fused import Kind, Part, stacks_of
from polyquant.architectures.hyper import Hyper
from polyquant.architectures.moves import in_order, numbered
from polyquant.architectures.record import Architecture
from polyquant.errors import InputError
from polyquant.operations import (
    SAME,
    Concat,
    Matrix,
    Operation,
    Reshape,
    Rows,
    Slice,
    Stack,
    Transpose,
    chain,
    steps_of,
)
from polyquant.types import TensorMap, Weight

__all__ = ["first_separate", "fused_maps", "separate_maps", "separated"]

_KINDS: tuple[Kind, ...] = ("weight", "bias")
_BOTH = "ffn_gate_up_exps.weight"


def separated(tensors: Iterable[TensorMap], config: Mapping[str, Any]) -> dict[str, tuple[TensorMap, ...]]:
    """Return, for each layer with fused experts, the fused tensor names -> the matrices and biases that replace them.

    {} for other models. The key is the name of a fused tensor; tensors that are not fused are not in the result.
    """
    record = of_config(config)
    if record is None or record.fused is None:
        return {}
    out, fused = {}, record.fused
    for tensor in tensors:
        parts = tuple(
            replace(_entry(stack, e), target=f"{stem}.{fused.separate(part, kind, e)}")
            for stem, part, kind, stack in stacks_of(tensor, fused)
            for e in range(stack.shape[0])
        )
        if parts:
            out[tensor.target] = parts
    return out


def _entry(stack: TensorMap, expert: int) -> TensorMap:
    """One entry of a stack. It is taken before it is cut or transposed, so that only this entry is read."""
    shape = stack.shape[1:]
    if stack.op == Stack():
        return replace(stack, sources=stack.sources[expert : expert + 1], shape=shape, op=SAME)
    steps = steps_of(stack.op)
    if not all(isinstance(s, Transpose) or (isinstance(s, Slice) and s.axis > 0) for s in steps):
        return replace(stack, shape=shape, op=chain(stack.op, Matrix(expert)))
    inner = (replace(s, axis=s.axis - 1) if isinstance(s, Slice) else s for s in steps)
    return replace(stack, shape=shape, op=chain(Matrix(expert), *inner))


# ---------------------------------------------------------------- reading


@dataclass(frozen=True, slots=True)
class _Place:
    """The part of a layer that a tensor belongs to. stem: its name up to the names inside the layer."""

    layer: int
    stem: str
    part: Part
    kind: Kind


def first_separate(names: Iterable[str], record: Architecture) -> str | None:
    """Return the first name of a separate expert where transformers has fused ones, None if there is none."""
    templates = _templates(record)
    found = (name for name in names if _place(name, record, templates) is not None)
    return next(found, None) if templates else None


def separate_maps(
    weights: Sequence[Weight], record: Architecture, hyper: Hyper, file: object
) -> dict[str, TensorMap | None]:
    """Return source -> map of the GGUF stack that it becomes, None for its other sources; {} without separate experts.

    Raises InputError for a missing expert.
    """
    found = _found(weights, record, hyper, file)
    together = _BOTH in record.names.exact.values()
    out: dict[str, TensorMap | None] = {}
    for place, experts in found.items():
        if not (together and place.kind == "weight" and place.part != "down"):
            _add(out, f"blk.{place.layer}.ffn_{place.part}_exps.{place.kind}", experts, Stack())
    for (layer, _), pairs in _pairs(found, "weight", file).items() if together else ():
        _add(out, f"blk.{layer}.{_BOTH}", pairs, _joined(pairs))
    return out


def fused_maps(
    weights: Sequence[Weight], record: Architecture, hyper: Hyper, file: object
) -> dict[str, TensorMap | None]:
    """Return source -> map of transformers' fused tensor that it becomes, None for its other sources.

    Raises InputError for a missing expert.
    """
    fused, found = record.fused, _found(weights, record, hyper, file)
    if fused is None:
        return {}
    out: dict[str, TensorMap | None] = {}
    for kind, end in zip(_KINDS, ("", "_bias"), strict=True):
        turned = (Transpose(),) if fused.transposed and kind == "weight" else ()
        for (_, stem), pairs in _pairs(found, kind, file).items():
            order = np.arange(2 * pairs[0].shape[0]).reshape(2, -1).T.reshape(-1)
            alternate = (Rows(order, axis=1),) if fused.alternate else ()
            op = chain(_joined(pairs), *alternate, *turned)
            _add(out, f"{stem}.{fused.joined}{end}", pairs, op)
        for place, experts in found.items():
            if (place.part, place.kind) == ("down", kind):
                _add(out, f"{place.stem}.{fused.down}{end}", experts, chain(Stack(), *turned))
    return out


def _add(out: dict[str, TensorMap | None], target: str, sources: Sequence[Weight], op: Operation) -> None:
    names = tuple(w.name for w in sources)
    out |= dict.fromkeys(names)
    shape = op.shape([w.shape for w in sources], names[0])
    out[names[0]] = TensorMap(target, names, shape, op, keep_float=len(shape) < 3)


def _joined(pairs: Sequence[Weight]) -> Operation:
    """Gate and up of each expert in turn -> [experts, 2 * width, ...]."""
    rows, *rest = pairs[0].shape
    return chain(Concat(0), Reshape((len(pairs) // 2, 2 * rows, *rest)))


def _pairs(found: Mapping[_Place, Sequence[Weight]], kind: Kind, file: object) -> dict[tuple[int, str], list[Weight]]:
    """(layer, stem) -> gate and up of each expert in turn. Raises InputError if only one of them exists."""
    parts = {
        part: {(p.layer, p.stem): w for p, w in found.items() if (p.part, p.kind) == (part, kind)}
        for part in ("gate", "up")
    }
    for layer in parts["gate"].keys() ^ parts["up"].keys():
        (have,) = (weights[layer] for weights in parts.values() if layer in weights)
        raise InputError("gate and up form one tensor, and the other one is missing", file=file, tensor=have[0].name)
    return {
        layer: [w for pair in zip(gates, parts["up"][layer], strict=True) for w in pair]
        for layer, gates in parts["gate"].items()
    }


def _found(weights: Sequence[Weight], record: Architecture, hyper: Hyper, file: object) -> dict[_Place, list[Weight]]:
    """Part -> its tensors in the order of the experts. Raises InputError for a missing expert, or one too many."""
    templates, out = _templates(record), dict[_Place, dict[int, Weight]]()
    for weight in weights if templates else ():
        if (found := _place(weight.name, record, templates)) is not None:
            out.setdefault(found[0], {})[found[1]] = weight
    return {place: in_order(experts, hyper, file) for place, experts in out.items()}


def _templates(record: Architecture) -> dict[str, tuple[Part, Kind]]:
    """Names inside a layer with {e} for the expert; {} where the record itself reads them as separate tensors."""
    if record.fused is None or any(move.stacked for move in record.moves):
        return {}
    parts: tuple[Part, ...] = ("gate", "up", "down")
    return {record.fused.separate(part, kind, "{e}"): (part, kind) for part in parts for kind in _KINDS}


def _place(name: str, record: Architecture, templates: Mapping[str, tuple[Part, Kind]]) -> tuple[_Place, int] | None:
    """Part and expert of a tensor, None for one that is not of a separate expert."""
    if ".experts." not in name or (within := record.names.within(name)) is None:
        return None
    layer, inside = within
    template, expert = numbered(inside)
    found = templates.get(template)
    return None if found is None else (_Place(layer, name.removesuffix(f".{inside}"), *found), expert)
