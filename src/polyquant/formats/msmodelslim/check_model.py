"""What belongs to the model rather than to one layer: the scales of an 8-bit cache, and the norms that smoothing changed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import numpy as np

from polyquant.errors import InputError
from polyquant.formats.msmodelslim.check_layers import floats
from polyquant.formats.msmodelslim.description import CACHE_PARTS, split
from polyquant.formats.msmodelslim.survey import Survey
from polyquant.formats.stored import Stored
from polyquant.types import Finding, Severity

__all__ = ["cache_layers", "check_cache", "check_norms"]

ERROR, WARNING, NOTE = Severity.ERROR, Severity.WARNING, Severity.NOTE
_FLOATS = ("F32", "F16", "BF16")
_OF_KEYS = re.compile(r".*?\.(\d{1,9})\..*(k_proj|query_key_value|W_pack)\.weight")
"""A matrix that gives keys, and its layer."""


def cache_layers(found: Survey) -> dict[str, dict[str, dict[str, Stored]]]:
    """Attention -> "k_proj" or "v_proj" -> part -> tensor, of all scales and offsets of the cache."""
    out: dict[str, dict[str, dict[str, Stored]]] = {}
    for tensor, stored in found.plain.items():
        layer, part = split(tensor)
        if part in CACHE_PARTS:
            attention, side = split(layer)
            out.setdefault(attention, {}).setdefault(side, {})[part] = stored
    return out


def check_cache(found: Survey) -> Iterator[Finding]:
    """k and v, scale and offset, one entry a channel, all layers; and what the description says of it."""
    layers = cache_layers(found)
    yield from _declared(found, bool(layers))
    if not found.whole:
        return
    for attention, sides in layers.items():
        for side in ("k_proj", "v_proj"):
            for part in CACHE_PARTS:
                if part not in sides.get(side, {}):
                    yield Finding(
                        "ASC040", ERROR, "is missing beside the others of this layer", f"{attention}.{side}.{part}"
                    )
        for side, parts in sides.items():
            yield from _side(found, f"{attention}.{side}", parts)
    numbers = {int(m[1]) for name in layers if (m := re.search(r"\.(\d{1,9})\.", name))}
    layers_of_model = found.size("num_hidden_layers") or found.size("num_layers")
    if numbers and layers_of_model and len(numbers) < layers_of_model <= 10**6:
        attending = {int(m[1]) for name in found.tensors if (m := _OF_KEYS.fullmatch(name))}  # not all do in a hybrid
        needed = attending or set(range(layers_of_model))
        if missing := sorted(needed - numbers):
            message = f"{len(numbers)} of {len(needed)} layers have scales of the cache, layer {missing[0]} has none"
            yield Finding("ASC040", WARNING, message, file=found.path.name)


def _declared(found: Survey, some: bool) -> Iterator[Finding]:
    if not found.described:
        return
    said = found.description.whole.get("kv_cache_type")
    if said == "C8" and not some and found.whole:
        yield Finding(
            "ASC043", ERROR, "kv_cache_type is C8, and no tensor is a scale of the cache", file=found.files.description
        )
    elif some and said != "C8":
        message = "there are scales of the cache, and kv_cache_type is " + (
            "missing" if said is None else f"{str(said)[:40]!r}"
        )
        yield Finding("ASC043", WARNING, message, file=found.files.description)


def _side(found: Survey, layer: str, parts: Mapping[str, Stored]) -> Iterator[Finding]:
    channels = _channels(found, layer)
    for part, stored in parts.items():
        entry, name, file = stored.entry, f"{layer}.{part}", stored.source.path.name
        if entry.dtype not in _FLOATS or int(np.prod(entry.shape)) != max(entry.shape, default=1):
            yield Finding(
                "ASC041", ERROR, f"must be floats, one a channel, found {entry.dtype} {list(entry.shape)}", name, file
            )
            continue
        count = int(np.prod(entry.shape))
        if channels is not None and count != channels:
            yield Finding(
                "ASC041", ERROR, f"has {count} entries, {layer.rpartition('.')[2]} has {channels} channels", name, file
            )
        try:
            values = floats(stored)
        except InputError as e:
            yield Finding("ASC008", ERROR, e.message, name, file)
            continue
        if part == "kv_cache_scale":
            if bad := int((~(np.isfinite(values) & (values > 0))).sum()):
                yield Finding("ASC042", ERROR, f"{bad:,} scales are no positive finite numbers", name, file)
        elif bad := int((~((np.rint(values) == values) & (values >= -128) & (values <= 127))).sum()):
            yield Finding("ASC042", ERROR, f"{bad:,} offsets are no whole numbers from -128 to 127", name, file)


def _channels(found: Survey, layer: str) -> int | None:
    """Channels of k or v of a layer: rows of its own projection, else heads times their size by config.json."""
    if layer in found.linears:
        return found.linears[layer].shape[0]
    if f"{layer}.weight" in found.plain and len(shape := found.plain[f"{layer}.weight"].entry.shape) == 2:
        return shape[0]
    heads = found.size("num_key_value_heads") or found.size("multi_query_group_num")
    size = found.size("head_dim") or found.size("kv_channels")
    return heads * size if heads and size else None


def check_norms(found: Survey) -> Iterator[Finding]:
    """`.module.weight` and `.module.bias` of smoothed norms against the plain ones."""
    if not found.whole:
        return
    names = {split(t)[0].removesuffix(".module") for t in found.plain if split(t)[0].endswith(".module")}
    for norm in sorted(names):
        own, twin, shift = (found.plain.get(f"{norm}.{part}") for part in ("weight", "module.weight", "module.bias"))
        for part, stored in (("weight", own), ("module.weight", twin), ("module.bias", shift)):
            if stored is None:
                yield Finding(
                    "ASC050",
                    ERROR if part == "module.weight" else WARNING,
                    "is missing beside the others of this norm",
                    f"{norm}.{part}",
                )
        if own is None or twin is None:
            continue
        for part, stored in (("module.weight", twin), ("module.bias", shift)):
            if stored is not None and (stored.entry.shape != own.entry.shape or stored.entry.dtype not in _FLOATS):
                message = f"must be floats of the norm's shape {list(own.entry.shape)}, found {stored.entry.dtype} {list(stored.entry.shape)}"
                yield Finding("ASC050", ERROR, message, f"{norm}.{part}", stored.source.path.name)
        if _differs(own, twin):
            message = "differs from weight, which holds the norm of before smoothing"
            yield Finding("ASC051", NOTE, message, f"{norm}.module.weight", twin.source.path.name)


def _differs(own: Stored, twin: Stored) -> bool:
    both = own.entry.dtype in _FLOATS and twin.entry.dtype in _FLOATS and own.entry.shape == twin.entry.shape
    return both and not np.array_equal(floats(own), floats(twin), equal_nan=True)
