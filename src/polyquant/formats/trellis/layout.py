"""Laying out a Trellis v3 folder: every file, header and offset before any payload; the same bytes for the same input.

    model-00001-of-000NN.safetensors    NAME.indices, NAME.scales, NAME.su, NAME.sv of quantized weights; the others under their own names
    model.safetensors.index.json        always, also for one shard
    quantization_config.json            (config.py); the place of each error that is still to be measured is a slot (tensor, "mse")
    config.json                         with an entry `quantization_config`, so that transformers finds the plugin

A shard is never longer than asked for, header and all, unless one component alone is. The components of a weight stay together where they fit one shard.
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
"""Bytes of a header besides its tensors: length, __metadata__, padding."""


@dataclass(frozen=True, slots=True)
class _Stored:
    """One tensor in a file: which part of which weight it is, and how the file calls it."""

    key: tuple[str, str]
    spec: ArraySpec
    name: str
    dtype: str
    shape: Shape

    @property
    def cost(self) -> int:
        """Most bytes that it adds to a shard: its own, and its line of the header."""
        return self.spec.nbytes + len(json.dumps(self.name)) + _described(self.dtype, self.shape)


@lru_cache(maxsize=1 << 12)
def _described(dtype: str, shape: Shape) -> int:
    """Characters of a tensor's line in a header, besides its name."""
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
    """Shards, index, quantization_config.json, and `files` (config.json with an entry that names the quantization).

    origins: what each weight with a codec `Trellis` was made from. target_bits: what was asked for; by default the width that most weights
    have. Raises PlanError for codecs that have no place in such a folder, for names that collide, and if no weight is quantized.
    """
    quantized = [t for t in tensors if isinstance(t.codec, Trellis)]
    if not quantized:
        raise PlanError(
            "no weight would be quantized: this would be no Trellis folder",
            hint="say how many bits, e.g. --bits 4; or write floats, --to hf",
        )
    shards = _split([list(_stored(t)) for t in tensors], shard_bytes)
    plans, slots, weight_map = _shard_files(shards)
    total = sum(s.spec.nbytes for s in slots.values())
    plans.append(_whole(_INDEX, _json(_index(quantized, weight_map, total, method))))
    text, holes = config_text(quantized, origins, method, target_bits)
    plans.append(_with_holes(text, holes, slots))
    taken = {p.name for p in plans}
    for name, data in sorted(_with_entry(files, quantized, method).items()):
        if not inner_name(name) or name.partition("/")[0] in taken:
            raise PlanError("a file beside the weights needs a plain name of its own", file=name)
        plans.append(_whole(name, data))
    return Layout(tuple(plans), slots, folder=True)


def _stored(tensor: TensorSpec) -> Iterator[_Stored]:
    """The tensors that hold one weight. Raises PlanError for a codec that has no place here."""
    specs, codec = tensor.codec.specs(tensor.shape), tensor.codec
    if isinstance(codec, Trellis):
        for part, spec in specs.items():
            yield _Stored((tensor.name, part), spec, f"{tensor.name}.{part}", BY_NUMPY[spec.dtype], spec.shape)
    elif (dtype := word_of(codec)) is not None:
        for part, spec in specs.items():
            yield _Stored((tensor.name, part), spec, tensor.name, dtype, tensor.shape)
    else:
        raise PlanError(
            f"a Trellis folder cannot hold {codec}",
            tensor=tensor.name,
            hint=f"give it another: --rule '{tensor.name}=trellis.4', or =bf16",
        )


def _split(weights: list[list[_Stored]], limit: int) -> list[list[_Stored]]:
    """Weights in their order into shards; one that is larger than a shard is cut between its components."""
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
    """Files, slots and weight_map. Raises PlanError if two tensors would share a name."""
    plans, slots = [], {}
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards):
        file = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        for s in shard:
            if s.name in weight_map or s.name == "__metadata__":
                raise PlanError("two tensors would share a name", tensor=s.name)
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
    """quantization_config.json in pieces around the errors to come, whose places join the slots."""
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


def _whole(name: str, data: bytes) -> FilePlan:
    return FilePlan(name, len(data), ((0, data),))
