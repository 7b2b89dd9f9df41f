"""An msModelSlim folder as the model that other formats know: no norm has a bias, nothing is said twice, nothing is of the cache.

    norm.module.weight, norm.module.bias     v0's second copy of a smoothed norm; where it differs from the first it is the one that was quantized for
    X.kv_cache_scale, X.kv_cache_offset      steps of an int8 cache: dropped, and said
    norm.bias                                zeros unless inputs were shifted: dropped. A shift b is folded into the layers X behind the norm,
                                             W (norm(x) + b) + c = W norm(x) + (c + W b): X.bias = c + W b

Where the architecture has no X.bias the tool made it, c = -W b up to the rounding of the weights: both are dropped, and the residue is said.
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
_TWIN = (".module.weight", ".module.bias")


def plain_model(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint without what only msModelSlim has; linear layers keep their codes. Layers behind a shifted norm are read.

    Raises UnsupportedError for a norm that its layers do not agree on, and for a shift that cannot be folded.
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
            notes.append(f"{name} shifts its norm; this architecture is not known, so it is kept as it is")
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
    """Leave one of the two copies of a norm, and yield what was dropped. Raises UnsupportedError where float layers need the one, quantized ones the other."""
    by_role = _by_role(record, weights)
    twins = [n for n in weights if n.endswith(_TWIN)]
    for name in twins:
        module, last = name.rsplit(".module.", 1)
        first, second = weights.get(f"{module}.{last}"), weights.pop(name)
        if first is not None and np.array_equal(_floats(first), _floats(second)):
            continue
        role = (record.names.to_gguf(f"{module}.weight") or "") if record is not None else ""
        behind = [weights[by_role[f"{r}.weight"]].codec.form is Floats for r in _layers_behind(record, role, by_role)]
        if first is not None and behind and all(behind):
            continue  # layers that stayed float read the norm as it was
        if first is not None and any(behind):
            raise UnsupportedError(
                "float and quantized layers behind this norm read it differently",
                file=checkpoint.path,
                tensor=name,
                hint="convert the float model instead",
            )
        weights[f"{module}.{last}"] = replace(second, name=f"{module}.{last}")
    if twins:
        yield f"{len(twins)} tensors norm.module.* say a norm twice: dropped"


def _recover_biases(checkpoint: Checkpoint, record: Architecture | None, weights: dict[str, Weight]) -> Iterator[str]:
    """Static layers whose architecture has a bias and whose file has it in quant_bias only: bias = (quant_bias + input_offset * sum of codes) * deq_scale."""
    found = []
    for role, name in _by_role(record, weights).items():
        weight, bias, stem = weights[name], name.removesuffix(".weight") + ".bias", role.split(".")[-2]
        static = isinstance(weight.codec, MsModelSlim) and weight.codec.static
        if record is None or not static or bias in weights or not record.has_bias(checkpoint.config, stem):
            continue
        codes = weight.codec.unpack(weight.read(), weight.shape)
        grid = codes.activation
        moved = grid.quant_bias + float(grid.offset[0]) * codes.codes.sum(1, dtype=np.int64)
        weights[bias] = _held(bias, (moved * grid.deq_scale).astype(np.float32), checkpoint)
        found.append(bias)
    if found:
        yield f"{len(found)} biases are said by quant_bias only: computed from it, up to its rounding (first: {found[0]})"


def _held(name: str, values: F32, checkpoint: Checkpoint) -> Weight:
    """A vector in memory, of the model's float type."""
    kind = codec(floats_of(checkpoint.config))
    return Weight(name, values.shape, kind, in_memory(kind.pack(kind.quantize(values))))


def _is_norm(module: str, weights: Mapping[str, Weight]) -> bool:
    """True for a vector of weights that is called a norm."""
    found = weights.get(f"{module}.weight")
    return found is not None and len(found.shape) == 1 and "norm" in module.rpartition(".")[2]


def _floats(weight: Weight) -> F32:
    return weight.codec.dequantize(weight.read(), weight.shape)


def _fold(
    checkpoint: Checkpoint, record: Architecture, weights: dict[str, Weight], shifts: Mapping[str, F32]
) -> Iterator[str]:
    """Give every layer behind a shifted norm its bias, and yield what was dropped. Raises UnsupportedError."""
    by_role = _by_role(record, weights)
    dropped: list[tuple[float, float, str]] = []
    for name, shift in shifts.items():
        behind = _layers_behind(record, record.names.to_gguf(name) or "", by_role)
        if not behind:
            raise UnsupportedError(
                "this norm has a shift that no linear layer behind it can take",
                file=checkpoint.path,
                tensor=name,
                hint="convert the float model instead",
            )
        for role in behind:
            linear, stem = by_role[f"{role}.weight"], role.rpartition(".")[2]
            moved = (_floats(weights[linear]) @ shift).astype(np.float32)  # [N]
            bias = linear.removesuffix(".weight") + ".bias"
            total = moved + _floats(weights[bias]) if bias in weights else moved
            if record.has_bias(checkpoint.config, stem):
                weights[bias] = _held(bias, total, checkpoint)
            else:
                weights.pop(bias, None)
                dropped.append((float(np.abs(total).max()), float(np.abs(moved).max()), bias))
    yield f"{len(shifts)} norms shift what they give: folded into the biases behind them"
    if dropped:
        left, of, name = max(dropped)
        yield (
            f"{len(dropped)} biases cancel the shift of their norm and the architecture has none: dropped; what the rounded weights leave of them is "
            f"at most {left:.3g} of {of:.3g} (in {name})"
        )


def _by_role(record: Architecture | None, weights: Mapping[str, Weight]) -> dict[str, str]:
    """Role "blk.0.attn_q.weight" -> name; none of an architecture that is not known."""
    if record is None:
        return {}
    return {role: name for name in weights if (role := record.names.to_gguf(name)) is not None}


def _layers_behind(record: Architecture | None, norm: str, by_role: Mapping[str, str]) -> list[str]:
    """Roles "blk.0.attn_q" of the layers that read the norm with role "blk.0.attn_norm.weight"."""
    block, _, stem = norm.rpartition(".")[0].rpartition(".")
    readers = () if record is None else record.readers_of(stem)
    return [f"{block}.{s}" for s in readers if f"{block}.{s}.weight" in by_role]
