"""Lay out a Hugging Face folder: every file, header and offset before any payload. Deterministic."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from polyquant.codecs.hf_mxfp4 import HF_MXFP4
from polyquant.errors import PlanError, listed
from polyquant.formats.huggingface.dtypes import PACKED, bitnet_codec, stored_tensors
from polyquant.formats.huggingface.exl3 import METHOD, exl3_config
from polyquant.formats.huggingface.mxfp4 import BLOCKS, mxfp4_config
from polyquant.formats.huggingface.mxfp4 import METHOD as MXFP4
from polyquant.formats.huggingface.scheme_names import DEFAULTS
from polyquant.formats.huggingface.schemes import Scheme, StoredTensor, WritesFiles, scheme_named, scheme_of
from polyquant.storage import strict_json
from polyquant.storage.folder import inner_name
from polyquant.storage.safetensors import header_bytes
from polyquant.types import ArraySpec, Codec, FilePlan, Layout, Slot, TensorSpec

__all__ = ["lay_out", "one_file"]

_GONE = (METHOD, MXFP4, "polyquant_trellis")
"""Methods whose quantization_config is removed if none of the tensors uses them any more."""
_INDEX = "model.safetensors.index.json"
_Stored = tuple[tuple[str, str] | None, int, ArraySpec | None, StoredTensor]
"""Slot key (None for a constant), bytes, spec of the part, and the tensor in the file."""


def lay_out(
    tensors: Sequence[TensorSpec],
    files: Mapping[str, bytes],
    *,
    shard_bytes: int = 5_000_000_000,
    metadata: Mapping[str, str] | None = None,
    before: Mapping[str, Any] | None = None,
    scheme: str | None = None,
) -> Layout:
    """Lay out safetensors shards of at most shard_bytes (a larger tensor gets its own shard), the index, and `files`.

    Of `files` only config.json is changed, if it would cause the weights to be misread. metadata: `__metadata__` of
    every shard, default {"format": "pt"}. before: the source's config.json, of which schemes keep what does not
    concern the weights. scheme: the requested one, for codecs that several schemes can store.

    Raises PlanError for unsupported codecs and for names that collide.
    """
    chosen = _scheme(tensors, scheme)
    files = _with_matching_config(tensors, files, chosen, before or {})
    metadata = {"format": "pt"} if metadata is None else metadata
    shards = _split(list(_stored(tensors, chosen)), shard_bytes)
    plans: list[FilePlan] = []
    slots: dict[tuple[str, str], Slot] = {}
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards):
        file = "model.safetensors" if len(shards) == 1 else f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        plan, placed = _file(file, shard, metadata)
        plans.append(plan)
        slots |= placed
        weight_map |= {stored.name: file for *_, stored in shard}
    if len(shards) > 1:
        total = sum(nbytes for shard in shards for _, nbytes, _, _ in shard)
        content = {"metadata": {"total_size": total}, "weight_map": weight_map}
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
    _with_matching_config(tensors, {}, None, {})
    plan, slots = _file("model.safetensors", list(_stored(tensors, None)), {"format": "pt", **metadata})
    return Layout((plan,), slots, folder=False)


def _file(
    file: str, stored: Sequence[_Stored], metadata: Mapping[str, str]
) -> tuple[FilePlan, dict[tuple[str, str], Slot]]:
    header, placed = header_bytes([(t.name, t.dtype, t.shape) for *_, t in stored], metadata)
    at = {e.name: e for e in placed}
    slots, pieces = {}, [(0, header)]
    for key, nbytes, spec, tensor in stored:
        entry = at[tensor.name]
        assert entry.nbytes == nbytes, (tensor.name, entry.nbytes, nbytes)
        if key is None or spec is None:
            pieces.append((entry.offset, tensor.data))
        else:
            slots[key] = Slot(file, entry.offset, spec)
    return FilePlan(file, len(header) + sum(e.nbytes for e in placed), tuple(pieces)), slots


def _with_matching_config(
    tensors: Sequence[TensorSpec], files: Mapping[str, bytes], scheme: Scheme | None, before: Mapping[str, Any]
) -> Mapping[str, bytes]:
    """`files` with config.json whose quantization_config matches the packed weights, or is absent if there are none."""
    kinds = {t.codec.name.removeprefix(PACKED) for t in tensors if t.codec.name.startswith(PACKED)}
    if len(kinds) > 1:
        raise PlanError("a folder cannot contain both kinds of packed BitNet weights", found=", ".join(sorted(kinds)))
    exl3 = exl3_config(tensors)
    if scheme is not None and (kinds or exl3 is not None):
        raise PlanError(f"a folder cannot contain both {scheme.title} and other packed weights")
    if kinds and exl3 is not None:
        raise PlanError("a folder cannot contain both packed BitNet and EXL3 weights")
    if "config.json" not in files:
        if kinds:
            raise PlanError("packed BitNet weights need a config.json, which defines the meaning of their scale")
        if scheme is not None:
            raise PlanError(f"{scheme.title} need a config.json, which describes their codes")
        return files
    config = strict_json.typed(strict_json.parse(files["config.json"], file="config.json"), dict, "config.json")
    if "transformers_weights" in config:  # the source's file name, or a marker that plain transformers cannot read it
        del config["transformers_weights"]
        files = _with_config(files, config)
    if scheme is not None:
        kept_entries = {k: v for k, v in config.items() if k not in ("quantization_config", "quantization")}
        own = scheme.files(tensors) if isinstance(scheme, WritesFiles) else {}
        return {**_with_config(files, {**kept_entries, **scheme.settings(tensors, before or config)}), **own}
    found = _described(tensors, config, kinds, exl3)
    return files if found is None else _with_config(files, found)


def _described(
    tensors: Sequence[TensorSpec], config: dict[str, Any], kinds: set[str], exl3: Mapping[str, Any] | None
) -> Mapping[str, Any] | None:
    """config.json with the quantization_config of BitNet, EXL3 and MXFP4 weights, or without it; None if it fits."""
    quantization = config.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    if exl3 is not None:
        kept: Mapping[str, Any] = quantization if method == METHOD and isinstance(quantization, dict) else {}
        return {**config, "quantization_config": {**kept, **exl3}}
    if (mxfp4 := mxfp4_config(tensors)) is not None:
        return {**config, "quantization_config": quantization if method == MXFP4 else mxfp4}
    rest = {key: value for key, value in config.items() if key != "quantization_config"}
    if method in _GONE and not kinds:
        return rest
    declared = bitnet_codec(config)
    if (declared.name.removeprefix(PACKED) if declared else None) == next(iter(kinds), None):
        return None
    if not kinds:
        return rest
    unpacked = [t.name for t in tensors if len(t.shape) == 2 and not t.codec.name.startswith(PACKED)]
    named = {n.removesuffix(".weight") for n in unpacked if n.endswith(".weight") and "embed" not in n}
    entries = {
        "quant_method": "bitnet", "linear_class": kinds.pop(), "quantization_mode": "offline",
        "modules_to_not_convert": sorted(named | {"lm_head"}),
    }  # fmt: skip
    return {**config, "quantization_config": entries}


def _scheme(tensors: Sequence[TensorSpec], wanted: str | None) -> Scheme | None:
    """The scheme of the quantized weights; None if there is none. wanted: taken where it holds them.

    Raises PlanError for several.
    """
    requested = None if wanted is None else scheme_named(wanted)
    found: dict[str, tuple[Scheme, str]] = {}
    for codec, name in {t.codec.name: (t.codec, t.name) for t in tensors}.values():
        scheme = requested if requested is not None and requested.holds(codec) else scheme_of(codec)
        if scheme is not None and not _as_experts(scheme, codec, name, requested):
            found.setdefault(scheme.name, (scheme, f"{name} ({codec})"))
    if requested is not None and requested.name not in found:
        held = {h.name: None for t in tensors if (h := requested.holding(t.codec, t.shape)) is not None}
        if not held and any(requested.quantizes(t.name, t.shape) for t in tensors):
            held = {DEFAULTS[requested.name]: None}
        raise PlanError(
            f"no weight can be stored as {requested.title}",
            found=", ".join(sorted({t.codec.name for t in tensors})) or "no tensors",
            hint=f"choose {listed(held)}, or another format" if held else "choose another format",
        )
    if len(found) > 1:
        examples = ", ".join(example for _, example in found.values())
        raise PlanError("a folder has one quantization scheme", found=examples, hint="choose codecs of one scheme")
    return next((scheme for scheme, _ in found.values()), None)


def _as_experts(scheme: Scheme, codec: Codec, name: str, requested: Scheme | None) -> bool:
    """True for the experts of gpt-oss, whose description needs no scheme unless it is requested."""
    return codec is HF_MXFP4 and name.endswith(BLOCKS) and (requested is None or not requested.holds(codec))


def _with_config(files: Mapping[str, bytes], config: Mapping[str, Any]) -> Mapping[str, bytes]:
    return {**files, "config.json": (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()}


def _stored(tensors: Sequence[TensorSpec], scheme: Scheme | None) -> Iterator[_Stored]:
    seen = {"__metadata__"}
    for t in tensors:
        specs = t.codec.specs(t.shape)
        for tensor in stored_tensors(t, scheme):
            if tensor.name in seen:
                raise PlanError("two tensors would have the same name", tensor=tensor.name)
            seen.add(tensor.name)
            if tensor.part is None:
                yield None, len(tensor.data), None, tensor
            else:
                yield (t.name, tensor.part), specs[tensor.part].nbytes, specs[tensor.part], tensor


def _split(stored: list[_Stored], limit: int) -> list[list[_Stored]]:
    """Split in the given order; at least one shard, even if it is empty."""
    shards: list[list[_Stored]] = [[]]
    used = 0
    for item in stored:
        if shards[-1] and used + item[1] > limit:
            shards.append([])
            used = 0
        shards[-1].append(item)
        used += item[1]
    return shards


def _json(content: Any) -> bytes:
    return (json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def _small_file(name: str, data: bytes) -> FilePlan:
    return FilePlan(name, len(data), ((0, data),))
