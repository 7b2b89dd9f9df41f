"""Convert an msModelSlim folder to a model for other formats: without norm biases, duplicates and cache scales.

    norm.module.weight, norm.module.bias     v0's second copy of a smoothed norm, used by quantized layers
    X.kv_cache_scale, X.kv_cache_offset      scales of an int8 cache: dropped with a note
    norm.bias                                zeros unless inputs were shifted: dropped. Shifts b go into layers X,
                                             W (norm(x) + b) + c = W norm(x) + (c + W b): X.bias = c + W b

If the architecture has no X.bias, the tool added it, with c = -W b up to the rounding of the weights: both are dropped,
and the remainder is reported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from polyquant.architectures.find import of_config
from polyquant.architectures.record import Architecture
from polyquant.codecs.affine_forms import floats_of
from polyquant.codecs.msmodelslim import MsModelSlim
from polyquant.errors import UnsupportedError
from polyquant.registry import codec
from polyquant.rows import in_memory
from polyquant.types import F32, Checkpoint, Floats, Weight

__all__ = ["plain_model"]

_CACHE = (".kv_cache_scale", ".kv_cache_offset")
_COPY = (".module.weight", ".module.bias")


def plain_model(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint without parts specific to msModelSlim; linear layers keep their codes. Layers after a shifted norm
    are read.

    Raises UnsupportedError for a norm that its layers use differently, and for a shift that cannot be folded.
    """
    record, weights, notes = of_config(checkpoint.config), dict(checkpoint.weights), []
    if cache := [weights.pop(n) for n in checkpoint if n.endswith(_CACHE)]:
        notes.append(f"{len(cache)} scales and offsets of an int8 cache are dropped: the target computes its own")
    notes += _one_norm(checkpoint, record, weights)
    notes += _recover_biases(checkpoint, record, weights)
    shifts = {}
    for name in [n for n in weights if n.endswith(".bias") and _is_norm(n.removesuffix(".bias"), weights)]:
        values = _floats(weights[name])
        if record is not None or not values.any():
            shifts[name] = values
            del weights[name]
        else:
            notes.append(f"{name} shifts its norm; the architecture is unknown, so it is kept")
    if empty := sum(not b.any() for b in shifts.values()):
        notes.append(f"{empty} biases of norms are zero: dropped")
    moved = {name: b for name, b in shifts.items() if b.any()}
    if moved and record is not None:
        notes += _fold(checkpoint, record, weights, moved)
    order = [n for name in checkpoint for n in (name, f"{name.removesuffix('.weight')}.bias")]
    ordered = {n: weights[n] for n in dict.fromkeys(order) if n in weights}
    return replace(
        checkpoint, format="hf", weights=ordered, metadata={}, notes=(*checkpoint.notes, *notes), describes_itself=False
    )


def _one_norm(checkpoint: Checkpoint, record: Architecture | None, weights: dict[str, Weight]) -> Iterator[str]:
    """Keep one of the two copies of a norm, and yield notes. Raises UnsupportedError if float and quantized layers need
    different ones.
    """
    by_role = _by_role(record, weights)
    copies = [n for n in weights if n.endswith(_COPY)]
    for name in copies:
        module, last = name.rsplit(".module.", 1)
        first, second = weights.get(f"{module}.{last}"), weights.pop(name)
        if first is not None and np.array_equal(_floats(first), _floats(second)):
            continue
        role = (record.names.to_gguf(f"{module}.weight") or "") if record is not None else ""
        readers = [weights[by_role[f"{r}.weight"]].codec.form is Floats for r in _layers_after(record, role, by_role)]
        if first is not None and readers and all(readers):
            continue  # float layers use the original norm
        if first is not None and any(readers):
            raise UnsupportedError(
                "float and quantized layers after this norm need different copies of it",
                file=checkpoint.path,
                tensor=name,
                hint="convert the float model instead",
            )
        weights[f"{module}.{last}"] = replace(second, name=f"{module}.{last}")
    if copies:
        yield f"{len(copies)} duplicate tensors norm.module.* are dropped"


def _recover_biases(checkpoint: Checkpoint, record: Architecture | None, weights: dict[str, Weight]) -> Iterator[str]:
    """Recover biases that are only included in quant_bias: bias = (quant_bias + input_offset * sum of codes) *
    deq_scale.
    """
    recovered = []
    for role, name in _by_role(record, weights).items():
        weight, bias, stem = weights[name], name.removesuffix(".weight") + ".bias", role.split(".")[-2]
        static = isinstance(weight.codec, MsModelSlim) and weight.codec.static
        if record is None or not static or bias in weights or not record.has_bias(checkpoint.config, stem):
            continue
        codes = weight.codec.unpack(weight.read(), weight.shape)
        grid = codes.activation
        moved = grid.quant_bias + float(grid.offset[0]) * codes.codes.sum(1, dtype=np.int64)
        weights[bias] = _in_memory(bias, (moved * grid.deq_scale).astype(np.float32), checkpoint)
        recovered.append(bias)
    if recovered:
        count = len(recovered)
        yield f"{count} biases were only included in quant_bias: recomputed, up to its rounding (first: {recovered[0]})"


def _in_memory(name: str, values: F32, checkpoint: Checkpoint) -> Weight:
    """A vector in memory, in the model's float type."""
    kind = codec(floats_of(checkpoint.config))
    return Weight(name, values.shape, kind, in_memory(kind.pack(kind.quantize(values))))


def _is_norm(module: str, weights: Mapping[str, Weight]) -> bool:
    """True for a weight vector named as a norm."""
    weight = weights.get(f"{module}.weight")
    return weight is not None and len(weight.shape) == 1 and "norm" in module.rpartition(".")[2]


def _floats(weight: Weight) -> F32:
    return weight.codec.dequantize(weight.read(), weight.shape)


def _fold(
    checkpoint: Checkpoint, record: Architecture, weights: dict[str, Weight], shifts: Mapping[str, F32]
) -> Iterator[str]:
    """Add the shift of a norm to the biases of the layers after it, and yield notes. Raises UnsupportedError."""
    by_role = _by_role(record, weights)
    dropped: list[tuple[float, float, str]] = []
    for name, shift in shifts.items():
        readers = _layers_after(record, record.names.to_gguf(name) or "", by_role)
        if not readers:
            raise UnsupportedError(
                "this norm has a shift, but no linear layer follows it",
                file=checkpoint.path,
                tensor=name,
                hint="convert the float model instead",
            )
        for role in readers:
            linear, stem = by_role[f"{role}.weight"], role.rpartition(".")[2]
            moved = (_floats(weights[linear]) @ shift).astype(np.float32)  # [N]
            bias = linear.removesuffix(".weight") + ".bias"
            total = moved + _floats(weights[bias]) if bias in weights else moved
            if record.has_bias(checkpoint.config, stem):
                weights[bias] = _in_memory(bias, total, checkpoint)
            else:
                weights.pop(bias, None)
                dropped.append((float(np.abs(total).max()), float(np.abs(moved).max()), bias))
    yield f"{len(shifts)} norms have a shift: folded into the biases of the layers after them"
    if dropped:
        left, of, name = max(dropped)
        yield (
            f"{len(dropped)} biases cancel the shift of their norm and are not part of the architecture: dropped; the "
            "remainder after rounding the "
            f"weights is at most {left:.3g} of {of:.3g} (in {name})"
        )


def _by_role(record: Architecture | None, weights: Mapping[str, Weight]) -> dict[str, str]:
    """Role "blk.0.attn_q.weight" -> name; empty for an unknown architecture."""
    if record is None:
        return {}
    return {role: name for name in weights if (role := record.names.to_gguf(name)) is not None}


def _layers_after(record: Architecture | None, norm: str, by_role: Mapping[str, str]) -> list[str]:
    """Roles "blk.0.attn_q" of the layers that read the norm with role "blk.0.attn_norm.weight"."""
    block, _, stem = norm.rpartition(".")[0].rpartition(".")
    readers = () if record is None else record.readers_of(stem)
    return [f"{block}.{s}" for s in readers if f"{block}.{s}.weight" in by_role]
