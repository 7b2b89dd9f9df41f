"""Lay out an msModelSlim folder: every file, header and offset before any payload. Deterministic.

    dialect    weights                                                     description
    v1         quant_model_weights.safetensors                             quant_model_description.json
    ascendv1   quant_model_weight.safetensors                              quant_model_description.json
    v0         quant_model_weight_w8a8.safetensors                         quant_model_description_w8a8.json

Several shards are named NAME-00001-of-0000N.safetensors and have NAME.safetensors.index.json. Part P of a quantized
weight X.weight is stored as X.P; other tensors keep their names. Files have no `__metadata__`. The source's other files
are copied, config.json without `quantization_config`, which would make consumers reject the folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polyquant.codecs.dtypes import BY_NUMPY, WORDS
from polyquant.codecs.msmodelslim import MsModelSlim
from polyquant.codecs.opaque_dtype import OpaqueDtype
from polyquant.errors import PlanError
from polyquant.formats.msmodelslim.describe import description, model_order, model_type
from polyquant.formats.msmodelslim.options import DIALECTS
from polyquant.storage import strict_json
from polyquant.storage.folder import inner_name
from polyquant.storage.safetensors import header_bytes
from polyquant.types import ArraySpec, FilePlan, Layout, Shape, Slot, TensorSpec

__all__ = ["SHARD_BYTES", "lay_out"]

SHARD_BYTES = 4_000_000_000


@dataclass(frozen=True, slots=True)
class _Stored:
    """One tensor in a file: weight, part, spec, and its name, dtype and shape in the file."""

    weight: TensorSpec
    part: str
    spec: ArraySpec
    name: str
    dtype: str
    shape: Shape


def lay_out(
    tensors: Sequence[TensorSpec],
    files: Mapping[str, bytes],
    *,
    shard_bytes: int = SHARD_BYTES,
    dialect: str = "v1",
    kv: bool = False,
    words: Mapping[str, str] | None = None,
    carried: Mapping[str, Any] | None = None,
) -> Layout:
    """Lay out shards shorter than shard_bytes (a larger tensor gets its own shard), the index, `files`, and the
    description.

    dialect: "v1", "ascendv1" or "v0". kv: declare a C8 cache even without its tensors. words: types of tensors that
    polyquant does not know, by name in the file; carried: other keys of the source's description. Raises PlanError for
    unsupported codecs and for names that collide.
    """
    if dialect not in DIALECTS:
        raise PlanError("unknown dialect of msModelSlim", expected=" or ".join(DIALECTS), found=dialect)
    stored = _stored(tensors)
    kind = model_type(tensors, dialect).lower()
    stem = {"v1": "quant_model_weights", "ascendv1": "quant_model_weight", "v0": f"quant_model_weight_{kind}"}[dialect]
    ordered = [stored[name] for name in model_order(stored, dialect)]
    plans, slots, weight_map = _shard_files(_split(ordered, shard_bytes), stem)
    if len(plans) > 1:
        total = sum(s.spec.nbytes for s in slots.values())
        content = {"metadata": {"total_size": total}, "weight_map": weight_map}
        plans.append(
            _small_file(f"{stem}.safetensors.index.json", json.dumps(content, indent=2, ensure_ascii=False).encode())
        )
    text = description(
        tensors, {s.name: s.weight for s in ordered}, dialect, kv=kv, words=words or {}, carried=carried or {}
    )
    name = f"quant_model_description_{kind}.json" if dialect == "v0" else "quant_model_description.json"
    taken = {name, *(p.name for p in plans)}
    for other, data in sorted(_with_config(files).items()):
        if not inner_name(other) or other.partition("/")[0] in taken:
            raise PlanError("additional files need a plain, unique name", file=other)
        plans.append(_small_file(other, data))
    return Layout((*plans, _small_file(name, text)), slots, folder=True)


def _stored(tensors: Sequence[TensorSpec]) -> dict[str, _Stored]:
    """Name in the file -> tensor. Raises PlanError if two have the same name, or for an unsupported codec."""
    out: dict[str, _Stored] = {}
    for weight in tensors:
        for stored_tensor in _tensors_of(weight):
            if stored_tensor.name in out or stored_tensor.name == "__metadata__":
                raise PlanError("two tensors would have the same name", tensor=stored_tensor.name)
            out[stored_tensor.name] = stored_tensor
    return out


def _tensors_of(weight: TensorSpec) -> list[_Stored]:
    codec, specs = weight.codec, weight.codec.specs(weight.shape)
    if isinstance(codec, MsModelSlim):
        if not weight.name.endswith(".weight"):
            raise PlanError("only tensors named *.weight can be quantized", tensor=weight.name, found=codec.name)
        module = weight.name.removesuffix("weight")
        return [
            _Stored(weight, part, spec, module + part, BY_NUMPY[spec.dtype], spec.shape) for part, spec in specs.items()
        ]
    if isinstance(codec, OpaqueDtype):
        return [_Stored(weight, "bytes", specs["bytes"], weight.name, codec.dtype, weight.shape)]
    if codec.name in WORDS:
        return [_Stored(weight, "blocks", specs["blocks"], weight.name, WORDS[codec.name], weight.shape)]
    raise PlanError(
        f"an msModelSlim folder cannot store {codec}",
        tensor=weight.name,
        hint=f"choose another codec: --rule '{weight.name}=w8a16', or =bf16",
    )


def _split(stored: list[_Stored], limit: int) -> list[list[_Stored]]:
    """Split in the given order; at least one shard, even if it is empty."""
    shards: list[list[_Stored]] = [[]]
    used = 0
    for item in stored:
        if shards[-1] and used + item.spec.nbytes >= limit:
            shards.append([])
            used = 0
        shards[-1].append(item)
        used += item.spec.nbytes
    return shards


def _shard_files(
    shards: list[list[_Stored]], stem: str
) -> tuple[list[FilePlan], dict[tuple[str, str], Slot], dict[str, str]]:
    """Files, slots and weight_map."""
    plans, slots = [], {}
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards):
        number = "" if len(shards) == 1 else f"-{i + 1:05}-of-{len(shards):05}"
        file = f"{stem}{number}.safetensors"
        header, placed = header_bytes([(s.name, s.dtype, s.shape) for s in shard], {})
        at = {e.name: e for e in placed}
        for s in shard:
            assert at[s.name].nbytes == s.spec.nbytes, (s.name, at[s.name].nbytes, s.spec.nbytes)
            slots[s.weight.name, s.part] = Slot(file, at[s.name].offset, s.spec)
            weight_map[s.name] = file
        plans.append(FilePlan(file, len(header) + sum(e.nbytes for e in placed), ((0, header),)))
    return plans, slots, weight_map


def _with_config(files: Mapping[str, bytes]) -> Mapping[str, bytes]:
    """`files` with a config.json without entries about quantization or other weight names."""
    if "config.json" not in files:
        return files
    config = strict_json.typed(strict_json.parse(files["config.json"], file="config.json"), dict, "config.json")
    parts = [config, *(inner for key in ("text_config", "llm_config") if isinstance(inner := config.get(key), dict))]
    gone = [(part, key) for part in parts for key in ("quantization_config", "transformers_weights") if key in part]
    for part, key in gone:
        del part[key]
    if not gone:
        return files
    return {**files, "config.json": (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()}


def _small_file(name: str, data: bytes) -> FilePlan:
    return FilePlan(name, len(data), ((0, data),))
