"""Check a folder for specific programs: features that they reject or compute wrongly, beyond general errors.

    vllm-ascend   reads quant_model_description.json; creates layers, fused q, k, v and gate, up, by the type of
                  `X.weight`; weight_scale [N, 1], deq_scale [N] float32 or int64 by the model's dtype; weight_offset
                  goes to a kernel that adds it
    sglang        the same file; W8A8 and W8A8_DYNAMIC layers, W8A8_DYNAMIC and W4A8_DYNAMIC experts
    mindie        either name of the description; negates weight_offset itself; its int8 cache is documented for float16

Sources: vllm-ascend of August 2026 (vllm_ascend/quantization/modelslim_config.py and methods/), SGLang of 2026
(srt/layers/quantization/modelslim/), MindIE LLM's manual, chapters W8A8, W8A16, KV Cache int8 (1.0 to 2.1).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from polyquant.errors import InputError, UnknownNameError
from polyquant.formats.msmodelslim.check_layers import floats
from polyquant.formats.msmodelslim.check_model import cache_layers
from polyquant.formats.msmodelslim.description import FLOAT, split
from polyquant.formats.msmodelslim.survey import Linear, Survey, survey
from polyquant.storage.folder import entries
from polyquant.storage.locations import located
from polyquant.types import Finding, Severity

__all__ = ["TARGETS", "check_target"]

ERROR, WARNING, NOTE = Severity.ERROR, Severity.WARNING, Severity.NOTE
_DESCRIPTION = "quant_model_description.json"
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@dataclass(frozen=True, slots=True)
class Consumer:
    """A consuming program.

    layers, experts: types of the description with kernels, None if no limit is known; checks: specific rules. former:
    (type, for experts) -> the releases that supported it.
    """

    layers: frozenset[str] | None
    experts: frozenset[str] | None
    checks: tuple[Callable[[Survey], Iterator[Finding]], ...]
    former: Mapping[tuple[str, bool], str] = field(default_factory=dict)


def check_target(path: str | os.PathLike[str], target: str) -> Iterator[Finding]:
    """Findings of a consumer about a folder. Raises UnknownNameError for an unknown consumer."""
    if target not in TARGETS:
        raise UnknownNameError("target", target, TARGETS)
    consumer, contents = TARGETS[target], survey(located(path))
    yield from _kernels(contents, consumer, target)
    for rule in consumer.checks:
        yield from rule(contents)


# ---------------------------------------------------------------- types


def _kernels(contents: Survey, consumer: Consumer, target: str) -> Iterator[Finding]:
    for tensor, word in contents.description.types.items():
        if (
            not tensor.endswith(".weight")
            or word == FLOAT
            or tensor not in contents.tensors
            or _is_norm(contents, tensor)
        ):
            continue
        expert = ".experts." in tensor
        known = consumer.experts if expert else consumer.layers
        if known is not None and word not in known:
            place = "experts" if expert else "layers outside experts"
            releases = consumer.former.get((word, expert))
            note = f" (its releases {releases} do)" if releases else ""
            yield Finding("ASC071", ERROR, f"{target} does not support {word} for {place}{note}", tensor)


def _is_norm(contents: Survey, tensor: str) -> bool:
    """True for norms that have the type of a layer."""
    return tensor in contents.plain and len(contents.plain[tensor].entry.shape) < 2


def _name(contents: Survey) -> Iterator[Finding]:
    name = contents.files.description
    if name is not None and name != _DESCRIPTION:
        yield Finding("ASC070", ERROR, f"only {_DESCRIPTION} is read", file=name)


def _joined(contents: Survey) -> Iterator[Finding]:
    """Check that q, k, v and gate, up have the same type."""
    layers = {split(t)[0] for t in contents.description.types if t.endswith(".weight")}
    for parent in dict.fromkeys(split(layer)[0] for layer in layers):
        for group in _FUSED:
            present = [p for p in group if f"{parent}.{p}" in layers]
            words = {contents.word(f"{parent}.{p}.weight") for p in present}
            if len(words) > 1:
                types = ", ".join(f"{p} {contents.word(f'{parent}.{p}.weight')}" for p in present)
                yield Finding(
                    "ASC076", ERROR, f"fused layers have different types: {types}", f"{parent}.{present[0]}.weight"
                )


def _leftover(contents: Survey) -> Iterator[Finding]:
    if (contents.config or {}).get("quantization_config") is not None:
        yield Finding("ASC078", ERROR, "quantization_config takes precedence over the description", file="config.json")


def _strays(contents: Survey) -> Iterator[Finding]:
    for name in entries(contents.path):
        if name.endswith(".safetensors") and name not in contents.files.names:
            yield Finding("ASC082", WARNING, "is also loaded, but is not part of the model", file=name)


# ---------------------------------------------------------------- shapes and values


def _shapes(contents: Survey) -> Iterator[Finding]:
    for x in contents.linears.values():
        if ".experts." in x.name and x.codec.kind == "w4a8.dynamic":
            if x.codec.group:
                yield Finding("ASC086", ERROR, f"groups of {x.codec.group} columns", f"{x.name}.weight_scale_second")
        elif x.codec.group or x.codec.flat or x.codec.tensor:
            part = "deq_scale" if x.codec.tensor and "weight_scale" not in x.parts else "weight_scale"
            message = f"is {list(x.parts[part].entry.shape)}, but must be one scale per row, [{x.shape[0]}, 1]"
            yield Finding("ASC072", ERROR, message, f"{x.name}.{part}")


def _groups(contents: Survey) -> Iterator[Finding]:
    for x in contents.linears.values():
        if x.codec.kind == "w8a16" and x.codec.group:
            yield Finding(
                "ASC072",
                ERROR,
                f"W8A16 in groups of {x.codec.group} columns; per channel only",
                f"{x.name}.weight_scale",
            )


def _deq_scale(contents: Survey) -> Iterator[Finding]:
    model, static = contents.model_dtype, [x for x in contents.linears.values() if x.codec.static]
    if static and model is not None and model[0] == "F32":
        yield Finding(
            "ASC074",
            ERROR,
            f"a float32 model ({model[1]}) with {len(static)} static layers",
            f"{static[0].name}.deq_scale",
        )


def _offsets(contents: Survey) -> Iterator[Finding]:
    for x in contents.linears.values():
        if x.codec.bits == 8 and "weight_offset" in x.parts and _nonzero(x, "weight_offset"):
            what = "is added instead of subtracted" if x.codec.kind == "w8a16" else "is ignored"
            yield Finding("ASC073", ERROR, f"a nonzero offset {what}", f"{x.name}.weight_offset")


def _nonzero(x: Linear, part: str) -> bool:
    try:
        return bool(floats(x.parts[part]).any())
    except InputError:
        return False  # the file shrank; `check` reports it


# ---------------------------------------------------------------- cache and norms


def _vllm_cache(contents: Survey) -> Iterator[Finding]:
    layers = cache_layers(contents)
    if layers and contents.description.general.get("kv_cache_type") != "C8":
        yield Finding("ASC080", ERROR, "cache scales without kv_cache_type C8", file=contents.files.description)
    for attention, sides in layers.items():
        for side, parts in sides.items():
            try:
                shifted = "kv_cache_offset" in parts and bool(floats(parts["kv_cache_offset"]).any())
            except InputError:
                continue  # the file shrank; `check` reports it
            if shifted:
                message = "nonzero offsets are ignored in decoding"
                yield Finding("ASC079", ERROR, message, f"{attention}.{side}.kv_cache_offset")


def _sglang_cache(contents: Survey) -> Iterator[Finding]:
    if layers := cache_layers(contents):
        name = next(iter(layers))
        yield Finding("ASC080", WARNING, "the scales of the int8 cache are not used", f"{name}.k_proj.kv_cache_scale")


def _mindie_cache(contents: Survey) -> Iterator[Finding]:
    if not cache_layers(contents):
        return
    model = contents.model_dtype
    if model is not None and model[0] != "F16":
        yield Finding("ASC084", WARNING, f"an int8 cache in a {model[0]} model ({model[1]})", file=contents.path.name)
    others = sorted({x.codec.word for x in contents.linears.values()} - {"W8A8", "W8A16"})
    if others:
        yield Finding("ASC084", WARNING, f"an int8 cache with {', '.join(others)} weights", file=contents.path.name)


def _norms(contents: Survey) -> Iterator[Finding]:
    for tensor in contents.plain:
        if split(tensor)[0].endswith(".module"):
            yield Finding("ASC081", ERROR, "no parameter has this name", tensor)


def _mindie_config(contents: Survey) -> Iterator[Finding]:
    if contents.config is not None and not isinstance(contents.config.get("quantize"), str):
        yield Finding("ASC083", NOTE, "no field quantize", file="config.json")
    sparse = [x for x in contents.linears.values() if x.codec.kind == "w8a8s"]
    if sparse:
        yield Finding(
            "ASC085", WARNING, f"{len(sparse)} layers are W8A8S and not yet compressed", f"{sparse[0].name}.weight"
        )


_OTHERS = frozenset({"W8A8_MXFP8", "W4A4_MXFP4", "W4A8_MXFP"})
"""Types of other number formats, which both servers support and polyquant keeps as stored."""
TARGETS: dict[str, Consumer] = {
    "vllm-ascend": Consumer(
        frozenset(
            {
                "W8A16",
                "W8A8",
                "W8A8_DYNAMIC",
                "W8A8_MIX",
                "W4A4_DYNAMIC",
                "W4A4_FLATQUANT_DYNAMIC",
                "W4A4_MXFP4_FLATQUANT",
                "W8A8FP8_DYNAMIC",
            }
        )
        | _OTHERS,
        frozenset({"W8A8_DYNAMIC", "W4A8_DYNAMIC", "W4A16_MXFP4", "W8A8FP8_DYNAMIC"}) | _OTHERS,
        (_name, _joined, _leftover, _strays, _shapes, _deq_scale, _offsets, _vllm_cache, _norms),
        {("W4A8_DYNAMIC", False): "0.13 to 0.26", ("W8A8_MIX", True): "0.13 to 0.26"},
    ),
    "sglang": Consumer(
        frozenset({"W8A8", "W8A8_DYNAMIC", "W4A4_DYNAMIC"}) | _OTHERS,
        frozenset({"W8A8_DYNAMIC", "W4A8_DYNAMIC", "W4A4_DYNAMIC", "W8A8_MXFP8"}),
        (_name, _joined, _leftover, _strays, _shapes, _deq_scale, _offsets, _sglang_cache, _norms),
    ),
    "mindie": Consumer(None, None, (_leftover, _groups, _mindie_cache, _mindie_config)),
}
