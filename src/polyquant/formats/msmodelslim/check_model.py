"""Check the parts that concern the whole model: scales of an 8-bit cache, and smoothed norms."""

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
"""A matrix that computes keys, and its layer."""


def cache_layers(contents: Survey) -> dict[str, dict[str, dict[str, Stored]]]:
    """Attention -> "k_proj" or "v_proj" -> part -> tensor, for all scales and offsets of the cache."""
    out: dict[str, dict[str, dict[str, Stored]]] = {}
    for tensor, stored in contents.plain.items():
        layer, part = split(tensor)
        if part in CACHE_PARTS:
            attention, side = split(layer)
            out.setdefault(attention, {}).setdefault(side, {})[part] = stored
    return out


def check_cache(contents: Survey) -> Iterator[Finding]:
    """Check k and v, scale and offset, one entry per channel, all layers, and the description."""
    layers = cache_layers(contents)
    yield from _declared(contents, bool(layers))
    if not contents.complete:
        return
    for attention, sides in layers.items():
        for side in ("k_proj", "v_proj"):
            for part in CACHE_PARTS:
                if part not in sides.get(side, {}):
                    yield Finding(
                        "ASC040", ERROR, "is missing, unlike others of this layer", f"{attention}.{side}.{part}"
                    )
        for side, parts in sides.items():
            yield from _side(contents, f"{attention}.{side}", parts)
    numbers = {int(m[1]) for name in layers if (m := re.search(r"\.(\d{1,9})\.", name))}
    layers_of_model = contents.size("num_hidden_layers") or contents.size("num_layers")
    if numbers and layers_of_model and len(numbers) < layers_of_model <= 10**6:
        attending = {
            int(m[1]) for name in contents.tensors if (m := _OF_KEYS.fullmatch(name))
        }  # only some layers do in hybrid models
        needed = attending or set(range(layers_of_model))
        if missing := sorted(needed - numbers):
            message = f"{len(numbers)} of {len(needed)} layers have cache scales, layer {missing[0]} has none"
            yield Finding("ASC040", WARNING, message, file=contents.path.name)


def _declared(contents: Survey, some: bool) -> Iterator[Finding]:
    if not contents.described:
        return
    stated = contents.description.general.get("kv_cache_type")
    if stated == "C8" and not some and contents.complete:
        yield Finding(
            "ASC043", ERROR, "kv_cache_type is C8, but there are no cache scales", file=contents.files.description
        )
    elif some and stated != "C8":
        message = "there are cache scales, but kv_cache_type is " + (
            "missing" if stated is None else f"{str(stated)[:40]!r}"
        )
        yield Finding("ASC043", WARNING, message, file=contents.files.description)


def _side(contents: Survey, layer: str, parts: Mapping[str, Stored]) -> Iterator[Finding]:
    channels = _channels(contents, layer)
    for part, stored in parts.items():
        entry, name, file = stored.entry, f"{layer}.{part}", stored.source.path.name
        if entry.dtype not in _FLOATS or int(np.prod(entry.shape)) != max(entry.shape, default=1):
            yield Finding(
                "ASC041", ERROR, f"must be floats, one per channel, found {entry.dtype} {list(entry.shape)}", name, file
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
                yield Finding("ASC042", ERROR, f"{bad:,} scales are not positive and finite", name, file)
        elif bad := int((~((np.rint(values) == values) & (values >= -128) & (values <= 127))).sum()):
            yield Finding("ASC042", ERROR, f"{bad:,} offsets are not integers from -128 to 127", name, file)


def _channels(contents: Survey, layer: str) -> int | None:
    """Channels of k or v of a layer: rows of its projection, else number of heads times head size from config.json."""
    if layer in contents.linears:
        return contents.linears[layer].shape[0]
    if f"{layer}.weight" in contents.plain and len(shape := contents.plain[f"{layer}.weight"].entry.shape) == 2:
        return shape[0]
    heads = contents.size("num_key_value_heads") or contents.size("multi_query_group_num")
    size = contents.size("head_dim") or contents.size("kv_channels")
    return heads * size if heads and size else None


def check_norms(contents: Survey) -> Iterator[Finding]:
    """Compare `.module.weight` and `.module.bias` of smoothed norms with the plain ones."""
    if not contents.complete:
        return
    names = {split(t)[0].removesuffix(".module") for t in contents.plain if split(t)[0].endswith(".module")}
    for norm in sorted(names):
        own, copy, shift = (contents.plain.get(f"{norm}.{part}") for part in ("weight", "module.weight", "module.bias"))
        for part, stored in (("weight", own), ("module.weight", copy), ("module.bias", shift)):
            if stored is None:
                yield Finding(
                    "ASC050",
                    ERROR if part == "module.weight" else WARNING,
                    "is missing, unlike others of this norm",
                    f"{norm}.{part}",
                )
        if own is None or copy is None:
            continue
        for part, stored in (("module.weight", copy), ("module.bias", shift)):
            if stored is not None and (stored.entry.shape != own.entry.shape or stored.entry.dtype not in _FLOATS):
                actual = f"{stored.entry.dtype} {list(stored.entry.shape)}"
                message = f"must be floats of the norm's shape {list(own.entry.shape)}, found {actual}"
                yield Finding("ASC050", ERROR, message, f"{norm}.{part}", stored.source.path.name)
        if _differs(own, copy):
            message = "differs from weight, which is the norm before smoothing"
            yield Finding("ASC051", NOTE, message, f"{norm}.module.weight", copy.source.path.name)


def _differs(own: Stored, copy: Stored) -> bool:
    both = own.entry.dtype in _FLOATS and copy.entry.dtype in _FLOATS and own.entry.shape == copy.entry.shape
    return both and not np.array_equal(floats(own), floats(copy), equal_nan=True)
