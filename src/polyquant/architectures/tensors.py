"""Tensor maps between the naming schemes, from a record: names, value changes, splits and stacks.

gguf_maps   of a Hugging Face checkpoint: the sources of each GGUF tensor
hf_maps     of a GGUF checkpoint: the inverse, derived from the same rules
usual_maps  of a Hugging Face checkpoint with other layouts (mlx-lm's, separate experts): the tensors of transformers
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from polyquant.architectures.changes import PairedRows
from polyquant.architectures.hyper import Hyper
from polyquant.architectures.mlx import mlx_maps
from polyquant.architectures.moves import Move, in_order, numbered
from polyquant.architectures.parts import parameters
from polyquant.architectures.record import Architecture
from polyquant.architectures.separate_experts import fused_maps, separate_maps
from polyquant.errors import InputError, UnsupportedError
from polyquant.inversion import inverted
from polyquant.operations import SAME, Joined, Operation, Reshape, Same, Stack, chain
from polyquant.types import Shape, TensorMap, Weight

__all__ = ["Mapped", "gguf_maps", "hf_maps", "is_float_tensor", "usual_maps", "without_ones"]

_LAYER = re.compile(r"blk\.([0-9]{1,5})\.(.+)")
# Matrices that llama.cpp keeps in float32 regardless of the recipe: its kernels require it.
_FLOAT_MATRICES = re.compile(
    r".*(_norm|ffn_gate_inp|ffn_gate_inp_shexp|ssm_conv1d|shortconv\.conv|position_embd|token_types)\.weight"
)


@dataclass(slots=True)
class Mapped:
    """maps: of the target's tensors, in source order. strange: sources unknown to the record."""

    maps: list[TensorMap] = field(default_factory=list)
    strange: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Group:
    """The sources of one move in one layer. found: expert index (0 for a single source) -> weight."""

    layer: int
    move: Move
    found: dict[int, Weight] = field(default_factory=dict)


@dataclass(slots=True)
class _Parts:
    """The targets of one move in one layer. found: name inside the layer -> weight."""

    layer: int
    move: Move
    found: dict[str, Weight] = field(default_factory=dict)


def is_float_tensor(name: str, shape: Shape) -> bool:
    """True for a GGUF tensor that stays float32: vectors, norms, routers, convolutions, and names without `.weight`."""
    return len(shape) < 2 or not name.endswith(".weight") or bool(_FLOAT_MATRICES.fullmatch(name))


# ---------------------------------------------------------------- Hugging Face -> GGUF


def gguf_maps(
    weights: Iterable[Weight], record: Architecture, hyper: Hyper, file: object, *, paired: bool = True
) -> Mapped:
    """Return the maps of all GGUF tensors.

    paired: permute rotated rows as files require; the runtime uses them in their stored order. Raises InputError for
    tensors that do not fit.
    """
    out = Mapped()
    slots: list[TensorMap | _Group] = []
    groups: dict[tuple[int, str], _Group] = {}
    moves = {move.source: move for move in record.moves}
    weights = list(weights)
    foreign = {**mlx_maps(weights, record, hyper, file), **separate_maps(weights, record, hyper, file)}
    for weight in weights:
        if weight.name in foreign:
            if (tensor_map := foreign[weight.name]) is not None:
                slots.append(tensor_map)
            continue
        if moves and (place := _moved(record, moves, weight)) is not None:
            layer, move, expert = place
            group = groups.get((layer, move.source))
            if group is None:
                group = groups[layer, move.source] = _Group(layer, move)
                slots.append(group)
            group.found[expert] = weight
            continue
        target = record.names.to_gguf(weight.name)
        if target is None:
            out.strange.append(weight.name)
            target = weight.name
        with _error_context(weight.name, file):
            slots.append(_single(weight, target, record, hyper, paired=paired))
    for slot in slots:
        out.maps += [slot] if isinstance(slot, TensorMap) else _group_maps(slot, record, hyper, file, paired=paired)
    return out


def _moved(record: Architecture, moves: dict[str, Move], weight: Weight) -> tuple[int, Move, int] | None:
    """Return (layer, move, expert) of a tensor that is the source of a move."""
    place = record.names.within(weight.name)
    if place is None:
        return None
    layer, inside = place
    if (move := moves.get(inside)) is not None:
        return (layer, move, 0) if move.fits(weight.codec.name) else None
    template, expert = numbered(inside)
    return None if (move := moves.get(template)) is None else (layer, move, expert)


def _single(weight: Weight, target: str, record: Architecture, hyper: Hyper, *, paired: bool) -> TensorMap:
    op, shape = _operation(target, weight.shape, record, hyper, paired=paired), weight.shape
    return TensorMap(target, (weight.name,), op.shape([shape], weight.name), op)


def _operation(target: str, shape: Shape, record: Architecture, hyper: Hyper, *, paired: bool = True) -> Operation:
    """Return the operation for a tensor with a one-to-one name."""
    change = record.change(target)
    if change is None or (not paired and isinstance(change, PairedRows)):
        return SAME
    return change.operation(hyper, shape)


def _group_maps(
    group: _Group, record: Architecture, hyper: Hyper, file: object, *, paired: bool
) -> Iterator[TensorMap]:
    """Yield a map for each target of a move."""
    sources = _complete(group, hyper, file)
    names, shapes = tuple(w.name for w in sources), [w.shape for w in sources]
    for inside in group.move.targets:
        with _error_context(names[0], file):
            op = _target_operation(group.move, inside, shapes, record, hyper, paired=paired)
            yield TensorMap(f"blk.{group.layer}.{inside}", names, op.shape(shapes, names[0]), op)


def _target_operation(
    move: Move, inside: str, shapes: Sequence[Shape], record: Architecture, hyper: Hyper, *, paired: bool = True
) -> Operation:
    """Return the operation that makes a target of a move from sources of these shapes."""
    each = {shape: move.targets[inside](hyper, shape) for shape in dict.fromkeys(shapes)}
    if not move.stacked:
        op = each[shapes[0]]
        return chain(op, _operation(inside, op.shape(shapes, inside), record, hyper, paired=paired))
    if all(isinstance(op, Same) for op in each.values()):
        return Stack()
    return Joined(tuple(each[shape] for shape in shapes), Stack())


def _complete(group: _Group, hyper: Hyper, file: object) -> list[Weight]:
    """Return the sources in expert order. Raises InputError if some are missing or exceed the configured count."""
    if not group.move.stacked:
        return [group.found[0]]
    return in_order(group.found, hyper, file, f" of layer {group.layer}")


# ---------------------------------------------------------------- GGUF -> Hugging Face


def hf_maps(
    weights: Iterable[Weight], record: Architecture, hyper: Hyper, file: object, *, packed: bool = False
) -> Mapped:
    """Return the maps of all Hugging Face tensors.

    packed: moves restricted to codecs apply only to weights of these codecs. Raises InputError for tensors that do not
    fit, UnsupportedError if a part of a Hugging Face tensor is missing.
    """
    out = Mapped()
    owners = _owners(record)
    slots: list[TensorMap | _Parts] = []
    parts: dict[tuple[int, str], _Parts] = {}
    for weight in weights:
        block = _LAYER.fullmatch(weight.name)
        stored_as = weight.codec.name if packed else ""
        move = next((m for m in owners.get(block[2], ()) if m.fits(stored_as)), None) if block else None
        if block is not None and move is not None:
            key = (int(block[1]), move.source)
            if key not in parts:
                parts[key] = _Parts(key[0], move)
                slots.append(parts[key])
            parts[key].found[block[2]] = weight
            continue
        target = record.names.to_hf(weight.name)
        if target is None:
            out.strange.append(weight.name)
            target = weight.name
        with _error_context(weight.name, file):
            slots.append(_single_back(weight, target, record, hyper))
    for slot in slots:
        out.maps += [slot] if isinstance(slot, TensorMap) else _parts_maps(slot, record, hyper, file)
    return out


def _owners(record: Architecture) -> dict[str, tuple[Move, ...]]:
    """Return GGUF name inside a layer -> the moves that produce it."""
    out: dict[str, tuple[Move, ...]] = {}
    for move in record.moves:
        for target in move.targets:
            out[target] = (*out.get(target, ()), move)
    return out


def _single_back(weight: Weight, target: str, record: Architecture, hyper: Hyper) -> TensorMap:
    change, shape = record.change(weight.name), _with_leading_ones(weight, record, hyper)
    before = _before_change(shape, weight.name, record, hyper)
    (back,) = (SAME,) if change is None else change.operation(hyper, before).inverse([before])
    keep_float = is_float_tensor(weight.name, shape)
    back = back if shape == weight.shape else chain(Reshape(shape), back)
    return TensorMap(target, (weight.name,), before, back, keep_float=keep_float)


def _with_leading_ones(weight: Weight, record: Architecture, hyper: Hyper) -> Shape:
    """Return the shape with the leading ones that llama.cpp's quantizer drops: [1, 64] is stored as [64]."""
    block = _LAYER.fullmatch(weight.name) if len(weight.shape) == 1 else None
    if block is None:
        return weight.shape
    index, inside = int(block[1]), block[2]
    shapes = {f"{stem}.weight": shape for stem, shape in record.layer.shapes(hyper, index).items()}
    expected = (shapes | parameters(record.layer, hyper, index)).get(inside, weight.shape)
    return expected if without_ones(expected) == weight.shape else weight.shape


def without_ones(shape: Shape) -> Shape:
    """Return the shape without leading ones; the last axis stays."""
    first = next((i for i, n in enumerate(shape[:-1]) if n != 1), len(shape) - 1)
    return shape[max(first, 0) :]


def _before_change(shape: Shape, target: str, record: Architecture, hyper: Hyper) -> Shape:
    """Return the shape of a GGUF tensor before its value change."""
    change = record.change(target)
    return shape if change is None else change.source(hyper, shape)


def _parts_maps(parts: _Parts, record: Architecture, hyper: Hyper, file: object) -> tuple[TensorMap, ...]:
    """Return the maps of the Hugging Face tensors of one move in one layer, from all its targets."""
    layer, move = parts.layer, parts.move
    missing = [target for target in move.targets if target not in parts.found]
    first = next(iter(parts.found.values()))
    if missing:
        raise InputError(
            f"{move.source} is made of several tensors, and one is missing",
            file=file,
            tensor=f"blk.{layer}.{missing[0]}",
            found=first.name,
        )
    targets = {inside: parts.found[inside] for inside in move.targets}
    with _error_context(first.name, file):
        before = move.before(hyper, [_before_change(w.shape, inside, record, hyper) for inside, w in targets.items()])
        stem = f"{record.names.prefix}{layer}.{move.source}"
        count = next(iter(targets.values())).shape[0] if move.stacked else 1
        names = tuple(stem.replace("{e}", str(e)) for e in range(count))
        shapes = [before] * count
        maps = []
        for inside, weight in targets.items():
            op = _target_operation(move, inside, shapes, record, hyper)
            shape = op.shape(shapes, weight.name)
            if shape != weight.shape:
                raise InputError("wrong shape for this configuration", expected=list(shape), found=list(weight.shape))
            keep_float = is_float_tensor(weight.name, weight.shape)
            maps.append(TensorMap(f"blk.{layer}.{inside}", names, shape, op, keep_float=keep_float))
        return inverted(maps, dict(zip(names, shapes, strict=True)))


# ---------------------------------------------------------------- other spellings


def usual_maps(weights: Sequence[Weight], record: Architecture, hyper: Hyper, file: object) -> list[TensorMap]:
    """Return the maps of transformers' tensors from an mlx-lm folder (architectures/mlx.py), via GGUF, or from one with
    separate experts (architectures/separate_experts.py); others keep their names.

    Raises InputError for tensors that do not fit, UnsupportedError for one that cannot be inverted.
    """
    foreign = mlx_maps(weights, record, hyper, file)
    gguf_maps_ = {m.target: m for m in foreign.values() if m is not None}
    by_name = {w.name: w for w in weights}
    gguf = [Weight(m.target, m.shape, by_name[m.sources[0]].codec, {}) for m in gguf_maps_.values()]
    back = [_composed(m, gguf_maps_) for m in hf_maps(gguf, record, hyper, file).maps]
    fused = fused_maps(weights, record, hyper, file)
    back += [m for m in fused.values() if m is not None]
    unchanged = [w for w in weights if w.name not in foreign and w.name not in fused]
    return [TensorMap(w.name, (w.name,), w.shape, keep_float=len(w.shape) < 2) for w in unchanged] + back


def _composed(back: TensorMap, made: Mapping[str, TensorMap]) -> TensorMap:
    """Compose `back` with the maps that make its sources."""
    first = [made[name] for name in back.sources]
    if len(first) == 1:
        return replace(back, sources=first[0].sources, op=chain(first[0].op, back.op))
    if not all(isinstance(m.op, Same) for m in first):
        raise UnsupportedError("is made of tensors that are joined more than once", tensor=back.target)
    return replace(back, sources=tuple(name for m in first for name in m.sources))


@contextmanager
def _error_context(tensor: str, file: object) -> Iterator[None]:
    """Add the tensor and the file to errors of operations."""
    try:
        yield
    except (InputError, UnsupportedError) as e:
        if e.file is not None:
            raise
        raise type(e)(
            e.message, file=file, tensor=e.tensor or tensor, expected=e.expected, found=e.found, hint=e.hint
        ) from e
