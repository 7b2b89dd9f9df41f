"""Lay out a Hugging Face folder: every file, header and offset before any payload. Deterministic."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from polyquant.errors import PlanError
from polyquant.formats.huggingface.dtypes import PACKED, bitnet_codec, stored_tensors
from polyquant.formats.huggingface.exl3 import METHOD, exl3_config
from polyquant.formats.huggingface.mxfp4 import METHOD as MXFP4
from polyquant.formats.huggingface.mxfp4 import mxfp4_config
from polyquant.storage import strict_json
from polyquant.storage.folder import inner_name
from polyquant.storage.safetensors import header_bytes
from polyquant.types import ArraySpec, FilePlan, Layout, Shape, Slot, TensorSpec

__all__ = ["lay_out", "one_file"]

_GONE = (METHOD, MXFP4, "polyquant_trellis")
"""Methods whose quantization_config is removed if none of the tensors uses them any more."""
_INDEX = "model.safetensors.index.json"
_Stored = tuple[tuple[str, str], ArraySpec, str, str, Shape]
"""Slot key, spec of the part, then name, dtype and shape in the file."""


def lay_out(
    tensors: Sequence[TensorSpec],
    files: Mapping[str, bytes],
    *,
    shard_bytes: int = 5_000_000_000,
    metadata: Mapping[str, str] | None = None,
) -> Layout:
    """Lay out safetensors shards of at most shard_bytes (a larger tensor gets its own shard), the index, and `files`.

    Of `files` only config.json is changed, if it would cause the weights to be misread. metadata: `__metadata__` of
    every shard, default {"format": "pt"}. Raises PlanError for unsupported codecs and for names that collide.
    """
    files = _with_matching_config(tensors, files)
    metadata = {"format": "pt"} if metadata is None else metadata
    shards = _split(list(_stored(tensors)), shard_bytes)
    plans: list[FilePlan] = []
    slots: dict[tuple[str, str], Slot] = {}
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards):
        file = "model.safetensors" if len(shards) == 1 else f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        plan, placed = _file(file, shard, metadata)
        plans.append(plan)
        slots |= placed
        weight_map |= {name: file for _, _, name, _, _ in shard}
    if len(shards) > 1:
        content = {"metadata": {"total_size": sum(s.spec.nbytes for s in slots.values())}, "weight_map": weight_map}
        plans.append(_small_file(_INDEX, _json(content)))
    taken = {p.name for p in plans}
    for name, data in sorted(files.items()):
        if not inner_name(name) or name.partition("/")[0] in taken:
            raise PlanError("additional files need a plain, unique name", file=name)
        plans.append(_small_file(name, data))
    return Layout(tuple(plans), slots, folder=True)


def one_file(tensors: Sequence[TensorSpec], metadata: Mapping[str, str]) -> Layout:
    """Lay out one safetensors file without a folder. metadata: `__metadata__`, with {"format": "pt"} added.

    Raises PlanError.
    """
    _with_matching_config(tensors, {})
    plan, slots = _file("model.safetensors", list(_stored(tensors)), {"format": "pt", **metadata})
    return Layout((plan,), slots, folder=False)


def _file(
    file: str, stored: Sequence[_Stored], metadata: Mapping[str, str]
) -> tuple[FilePlan, dict[tuple[str, str], Slot]]:
    header, placed = header_bytes([(name, dtype, shape) for _, _, name, dtype, shape in stored], metadata)
    at = {e.name: e for e in placed}
    slots = {}
    for key, spec, name, _, _ in stored:
        assert at[name].nbytes == spec.nbytes, (name, at[name].nbytes, spec.nbytes)
        slots[key] = Slot(file, at[name].offset, spec)
    return FilePlan(file, len(header) + sum(e.nbytes for e in placed), ((0, header),)), slots


def _with_matching_config(tensors: Sequence[TensorSpec], files: Mapping[str, bytes]) -> Mapping[str, bytes]:
    """`files` with config.json whose quantization_config matches the packed weights, or is absent if there are none."""
    kinds = {t.codec.name.removeprefix(PACKED) for t in tensors if t.codec.name.startswith(PACKED)}
    if len(kinds) > 1:
        raise PlanError("a folder cannot contain both kinds of packed BitNet weights", found=", ".join(sorted(kinds)))
    exl3 = exl3_config(tensors)
    if kinds and exl3 is not None:
        raise PlanError("a folder cannot contain both packed BitNet and EXL3 weights")
    if "config.json" not in files:
        if kinds:
            raise PlanError("packed BitNet weights need a config.json, which defines the meaning of their scale")
        return files
    config = strict_json.typed(strict_json.parse(files["config.json"], file="config.json"), dict, "config.json")
    if "transformers_weights" in config:  # the source's file name, or a marker that plain transformers cannot read it
        del config["transformers_weights"]
        files = _with_config(files, config)
    quantization = config.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    if exl3 is not None:
        kept: Mapping[str, Any] = quantization if method == METHOD and isinstance(quantization, dict) else {}
        return _with_config(files, {**config, "quantization_config": {**kept, **exl3}})
    if (mxfp4 := mxfp4_config(tensors)) is not None:
        return _with_config(files, {**config, "quantization_config": quantization if method == MXFP4 else mxfp4})
    if method in _GONE and not kinds:
        del config["quantization_config"]
        return _with_config(files, config)
    declared = bitnet_codec(config)
    if (declared.name.removeprefix(PACKED) if declared else None) == next(iter(kinds), None):
        return files
    if kinds:
        unpacked = [t.name for t in tensors if len(t.shape) == 2 and not t.codec.name.startswith(PACKED)]
        modules = {n.removesuffix(".weight") for n in unpacked if n.endswith(".weight") and "embed" not in n} | {
            "lm_head"
        }
        config["quantization_config"] = {
            "quant_method": "bitnet", "linear_class": kinds.pop(), "quantization_mode": "offline",
            "modules_to_not_convert": sorted(modules),
        }  # fmt: skip
    else:
        del config["quantization_config"]
    return _with_config(files, config)


def _with_config(files: Mapping[str, bytes], config: Mapping[str, Any]) -> Mapping[str, bytes]:
    return {**files, "config.json": (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()}


def _stored(tensors: Sequence[TensorSpec]) -> Iterator[_Stored]:
    seen = {"__metadata__"}
    for t in tensors:
        specs = t.codec.specs(t.shape)
        for part, name, dtype, shape in stored_tensors(t.name, t.shape, t.codec):
            if name in seen:
                raise PlanError("two tensors would have the same name", tensor=name)
            seen.add(name)
            yield (t.name, part), specs[part], name, dtype, shape


def _split(stored: list[_Stored], limit: int) -> list[list[_Stored]]:
    """Split in the given order; at least one shard, even if it is empty."""
    shards: list[list[_Stored]] = [[]]
    used = 0
    for item in stored:
        if shards[-1] and used + item[1].nbytes > limit:
            shards.append([])
            used = 0
        shards[-1].append(item)
        used += item[1].nbytes
    return shards


def _json(content: Any) -> bytes:
    return (json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def _small_file(name: str, data: bytes) -> FilePlan:
    return FilePlan(name, len(data), ((0, data),))
