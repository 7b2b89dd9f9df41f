"""Lay out a Trellis v3 folder: every file, header and offset before any payload. Deterministic.

    model-00001-of-000NN.safetensors    NAME.indices, NAME.scales, NAME.su, NAME.sv of quantized weights; others
    model.safetensors.index.json        even for one shard
    quantization_config.json            see config.py; each error still to be measured is a slot (tensor, "mse")
    config.json                         with an entry `quantization_config`, so that transformers finds the plugin

A shard including its header never exceeds the limit, unless a single component does. The components of a weight are
kept together if they fit one shard.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from polyquant.codecs.dtypes import BY_NUMPY, word_of
from polyquant.codecs.trellis import Trellis
from polyquant.errors import PlanError
from polyquant.formats.trellis.config import (
    FILE,
    MSE_BYTES,
    WITHOUT_PLUGIN,
    Origin,
    config_entry,
    config_text,
    effective_bits,
)
from polyquant.storage import strict_json
from polyquant.storage.folder import inner_name
from polyquant.storage.safetensors import header_bytes
from polyquant.types import ArraySpec, FilePlan, Layout, Shape, Slot, TensorSpec

__all__ = ["SHARD_BYTES", "lay_out"]

SHARD_BYTES = 2_000_000_000
_INDEX = "model.safetensors.index.json"
_METADATA = {"format": "pt"}
_FRAME = 64
"""Bytes of a header without its tensors: length, __metadata__, padding."""


@dataclass(frozen=True, slots=True)
class _Stored:
    """One tensor in a file: (weight, part), spec, and its name, dtype and shape in the file."""

    key: tuple[str, str]
    spec: ArraySpec
    name: str
    dtype: str
    shape: Shape

    @property
    def cost(self) -> int:
        """Maximum bytes that it adds to a shard: its data and its header entry."""
        return self.spec.nbytes + len(json.dumps(self.name)) + _described(self.dtype, self.shape)


@lru_cache(maxsize=1 << 12)
def _described(dtype: str, shape: Shape) -> int:
    """Characters of a tensor's header entry without its name."""
    return len(json.dumps({"": {"dtype": dtype, "shape": shape, "data_offsets": [10**15, 10**15]}})) - len('""')


def lay_out(
    tensors: Sequence[TensorSpec],
    files: Mapping[str, bytes],
    *,
    shard_bytes: int = SHARD_BYTES,
    origins: Mapping[str, Origin],
    method: str = "trellis_viterbi",
    target_bits: int | None = None,
) -> Layout:
    """Lay out shards, index, quantization_config.json, and `files` (config.json with an entry that names the
    quantization).

    origins: the origin of each weight with a codec `Trellis`. target_bits: the requested bits; default: the width of
    most weights. Raises PlanError for unsupported codecs, for names that collide, and if no weight is quantized.
    """
    quantized = [t for t in tensors if isinstance(t.codec, Trellis)]
    if not quantized:
        raise PlanError(
            "no weight would be quantized, so this would not be a Trellis folder",
            hint="choose the bits, e.g. --bits 4, or write floats: --to hf",
        )
    shards = _split([list(_stored(t)) for t in tensors], shard_bytes)
    plans, slots, weight_map = _shard_files(shards)
    total = sum(s.spec.nbytes for s in slots.values())
    plans.append(_small_file(_INDEX, _json(_index(quantized, weight_map, total, method))))
    text, holes = config_text(quantized, origins, method, target_bits)
    plans.append(_with_holes(text, holes, slots))
    taken = {p.name for p in plans}
    for name, data in sorted(_with_entry(files, quantized, method).items()):
        if not inner_name(name) or name.partition("/")[0] in taken:
            raise PlanError("additional files need a plain, unique name", file=name)
        plans.append(_small_file(name, data))
    return Layout(tuple(plans), slots, folder=True)


def _stored(tensor: TensorSpec) -> Iterator[_Stored]:
    """The stored tensors of one weight. Raises PlanError for an unsupported codec."""
    specs, codec = tensor.codec.specs(tensor.shape), tensor.codec
    if isinstance(codec, Trellis):
        for part, spec in specs.items():
            yield _Stored((tensor.name, part), spec, f"{tensor.name}.{part}", BY_NUMPY[spec.dtype], spec.shape)
    elif (dtype := word_of(codec)) is not None:
        for part, spec in specs.items():
            yield _Stored((tensor.name, part), spec, tensor.name, dtype, tensor.shape)
    else:
        raise PlanError(
            f"a Trellis folder cannot store {codec}",
            tensor=tensor.name,
            hint=f"choose another codec: --rule '{tensor.name}=trellis.4', or =bf16",
        )


def _split(weights: list[list[_Stored]], limit: int) -> list[list[_Stored]]:
    """Split weights into shards in order; a weight larger than a shard is split between its components."""
    shards: list[list[_Stored]] = [[]]
    room = limit - _FRAME
    for weight in weights:
        costs = [s.cost for s in weight]
        fits = sum(costs) <= limit - _FRAME
        for group, cost in [(weight, sum(costs))] if fits else [([s], c) for s, c in zip(weight, costs, strict=True)]:
            if shards[-1] and cost > room:
                shards.append([])
                room = limit - _FRAME
            shards[-1] += group
            room -= cost
    return shards


def _shard_files(
    shards: list[list[_Stored]],
) -> tuple[list[FilePlan], dict[tuple[str, str], Slot], dict[str, str]]:
    """Files, slots and weight_map. Raises PlanError if two tensors would have the same name."""
    plans, slots = [], {}
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards):
        file = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        for s in shard:
            if s.name in weight_map or s.name == "__metadata__":
                raise PlanError("two tensors would have the same name", tensor=s.name)
            weight_map[s.name] = file
        header, placed = header_bytes([(s.name, s.dtype, s.shape) for s in shard], _METADATA)
        at = {e.name: e for e in placed}
        for s in shard:
            assert at[s.name].nbytes == s.spec.nbytes, (s.name, at[s.name].nbytes, s.spec.nbytes)
            slots[s.key] = Slot(file, at[s.name].offset, s.spec)
        plans.append(FilePlan(file, len(header) + sum(e.nbytes for e in placed), ((0, header),)))
    return plans, slots, weight_map


def _index(quantized: Sequence[TensorSpec], weight_map: Mapping[str, str], total: int, method: str) -> dict[str, Any]:
    rotated = any(isinstance(t.codec, Trellis) and t.codec.blocks(t.shape) != (1, 1) for t in quantized)
    return {
        "metadata": {
            "total_size": total,
            "format": "trellis_v3",
            "quantization": {
                "bits_per_weight": round(effective_bits(quantized), 6),
                "method": method,
                "hadamard_transform": rotated,
            },
        },
        "weight_map": weight_map,
    }


def _with_holes(text: bytes, holes: Mapping[str, int], slots: dict[tuple[str, str], Slot]) -> FilePlan:
    """quantization_config.json in pieces around the errors to be measured, whose positions are added to the slots."""
    pieces, at = [], 0
    for name, offset in holes.items():
        slots[name, "mse"] = Slot(FILE, offset, ArraySpec((MSE_BYTES,), np.dtype(np.uint8)))
        pieces.append((at, text[at:offset]))
        at = offset + MSE_BYTES
    return FilePlan(FILE, len(text), (*pieces, (at, text[at:])))


def _with_entry(files: Mapping[str, bytes], quantized: Sequence[TensorSpec], method: str) -> Mapping[str, bytes]:
    if "config.json" not in files:
        return files
    config = strict_json.typed(strict_json.parse(files["config.json"], file="config.json"), dict, "config.json")
    config["quantization_config"] = config_entry(quantized, method)
    config["transformers_weights"] = WITHOUT_PLUGIN
    return {**files, "config.json": _json(config)}


def _json(content: Any) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()


def _small_file(name: str, data: bytes) -> FilePlan:
    return FilePlan(name, len(data), ((0, data),))
