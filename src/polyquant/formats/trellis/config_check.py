"""Check quantization_config.json against the document and against the tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from polyquant.formats.trellis.folder import CONFIG
from polyquant.formats.trellis.options import METHODS
from polyquant.formats.trellis.survey import Survey
from polyquant.formats.trellis.weights import Facts
from polyquant.types import Finding, Severity

__all__ = ["check_config"]

ERROR, WARNING, NOTE = Severity.ERROR, Severity.WARNING, Severity.NOTE
_SHARED: dict[str, tuple[type, ...]] = {
    "average_bits_per_weight": (int, float), "target_bits": (int,), "hadamard_transform": (bool,), "tile_size": (int,),
}  # fmt: skip
_TENSOR: dict[str, tuple[type, ...]] = {
    "bits": (int,), "shape": (list,), "mse": (int, float), "original_bytes": (int,), "compressed_bytes": (int,),
    "compression_ratio": (int, float),
}  # fmt: skip
_LAYER = re.compile(r".*layers\.(\d+)\.(.+)\.weight")
_GROUPS = ("per_tile", "per_group", "per_tensor", "per_channel")
_WIDTHS = range(1, 9)
"""Bits of a code: 1 comes from EXL3 alone."""
_ROUNDING = 0.006
"""Relative tolerance for ratios and averages rounded to two or four digits."""


def check_config(contents: Survey) -> Iterator[Finding]:
    """Check documented fields, names on both sides, and figures."""
    content = contents.metadata.content
    if content is None:
        missing_elsewhere = any(b.code in ("TRL030", "TRL031") for b in contents.breaches)
        if contents.files.version == 3 and not missing_elsewhere:
            yield Finding("TRL030", WARNING, f"{CONFIG} is missing", file=contents.path.name)
    elif not contents.metadata.seed:
        yield _lacks("tensor_metadata")
    else:
        yield from _fields(content)
        yield from _values(content, contents.weights)
        yield from _allocation(content, contents.weights)
        yield from _figures(content, contents.weights)
    yield from _names(contents)


def _lacks(what: str, tensor: str | None = None) -> Finding:
    return Finding("TRL032", WARNING, f"{what} is missing or has the wrong type", tensor, CONFIG)


def _fields(content: Mapping[str, Any]) -> Iterator[Finding]:
    for key, kind in (("quantization_version", str), ("quantization_method", str), ("layer_allocation", dict)):
        if not isinstance(content.get(key), kind):
            yield _lacks(key)
    version = content.get("quantization_version")
    if isinstance(version, str) and version != "trellis_v3":
        yield Finding("TRL032", WARNING, f"quantization_version is {version[:40]!r}, not 'trellis_v3'", file=CONFIG)
    shared = content.get("global_config")
    if not isinstance(shared, dict):
        yield _lacks("global_config")
        return
    for key, kinds in _SHARED.items():
        if not _is(shared.get(key), kinds):
            yield _lacks(f"global_config.{key}")
    if _is(shared.get("tile_size"), (int,)) and shared["tile_size"] != 16:
        yield Finding("TRL032", ERROR, f"tile_size is {shared['tile_size']}, it must be 16", file=CONFIG)
    for name, entry in content["tensor_metadata"].items():
        for key, kinds in _TENSOR.items():
            if not _is(entry.get(key), kinds):
                yield _lacks(key, name)


def _values(content: Mapping[str, Any], weights: Mapping[str, Facts]) -> Iterator[Finding]:
    """Check values of the right type against those that the document and polyquant use."""
    method, shared = content.get("quantization_method"), content.get("global_config")
    if isinstance(method, str) and method not in METHODS:
        yield _unknown("quantization_method", method, METHODS)
    shared = shared if isinstance(shared, dict) else {}
    groups = shared.get("scale_groups")
    if groups is not None and groups not in _GROUPS:
        yield _unknown("global_config.scale_groups", groups, _GROUPS)
    if _is(shared.get("target_bits"), (int,)) and shared["target_bits"] not in _WIDTHS:
        yield _unknown("global_config.target_bits", shared["target_bits"], ("2 to 8",))
    size = shared.get("codebook_size")
    if size is not None and not (_is(size, (int,)) and 0 < size <= 1 << 16 and size.bit_count() == 1):
        yield _unknown("global_config.codebook_size", size, ("a power of two up to 65536",))
    yield from _allocated(content.get("layer_allocation"), weights)


def _allocated(layers: Any, weights: Mapping[str, Facts]) -> Iterator[Finding]:
    """Check the layers, modules and bits of layer_allocation."""
    named = {(m[1], m[2]) for name in weights if (m := _LAYER.fullmatch(name)) is not None}
    names = set(weights) | {name.removesuffix(".weight") for name in weights}
    for layer, modules in layers.items() if isinstance(layers, dict) else ():
        if not isinstance(modules, dict):
            yield _unknown(f"layer_allocation.{layer}", modules, ("an object",))
            continue
        for module, bits in modules.items():
            if not _is(bits, (int,)) or bits not in _WIDTHS:
                yield _unknown(f"layer_allocation.{layer}.{module}", bits, ("2 to 8",))
            elif (layer, module) not in named and module not in names:
                message = f"layer_allocation names {module[:60]} of layer {layer[:10]}, and no such weight is quantized"
                yield Finding("TRL033", WARNING, message, file=CONFIG)


def _unknown(key: str, value: Any, known: Sequence[str]) -> Finding:
    return Finding("TRL032", WARNING, f"{key} is {str(value)[:40]!r}, expected {' or '.join(known)}", file=CONFIG)


def _is(value: Any, kinds: tuple[type, ...]) -> bool:
    return isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))


def _names(contents: Survey) -> Iterator[Finding]:
    """Findings for tensors without metadata and metadata without tensors."""
    noted = contents.metadata.notes
    if not noted or not contents.complete:
        return
    broken = {b.tensor for b in contents.breaches}
    for name in contents.weights:
        if name not in noted:
            yield Finding("TRL033", WARNING, "is quantized but not in the metadata", name)
    for name, note in noted.items():
        if name not in contents.weights and name not in broken:
            yield Finding("TRL033", WARNING, "is in the metadata, but there is no such tensor", name, note.file.name)


def _allocation(content: Mapping[str, Any], weights: Mapping[str, Facts]) -> Iterator[Finding]:
    layers = content.get("layer_allocation")
    if not isinstance(layers, dict):
        return
    for name, facts in weights.items():
        match = _LAYER.fullmatch(name)
        layer = layers.get(match[1]) if match else None
        stated = layer.get(match[2]) if match and isinstance(layer, dict) else None
        if stated is not None and stated != facts.bits:
            message = f"layer_allocation states {str(stated)[:20]} bits, the tensor has {facts.bits}"
            yield Finding("TRL035", WARNING, message, name, CONFIG)


def _figures(content: Mapping[str, Any], weights: Mapping[str, Facts]) -> Iterator[Finding]:
    """Findings for byte counts and bit averages that omit components."""
    wrong = []
    for name, facts in weights.items():
        entry = content["tensor_metadata"].get(name, {})
        if _is(entry.get("compressed_bytes"), (int,)) and entry["compressed_bytes"] != _bytes(facts):
            wrong.append((name, entry["compressed_bytes"], _bytes(facts)))
    if wrong:
        name, stated, actual = wrong[0]
        message = (
            f"compressed_bytes of {len(wrong)} tensors do not include all components (here {stated}, actual {actual})"
        )
        yield Finding("TRL036", NOTE, message, name, CONFIG)
    shared = content.get("global_config")
    stated = shared.get("average_bits_per_weight") if isinstance(shared, dict) else None
    if stated is None or not _is(stated, (int, float)) or not weights:
        return
    actual_bits = 8 * sum(map(_bytes, weights.values())) / sum(f.n * f.k for f in weights.values())
    if abs(float(stated) - actual_bits) > _ROUNDING * actual_bits:
        message = f"average_bits_per_weight is {stated:.4g}, with all components it is {actual_bits:.4g}"
        yield Finding("TRL036", NOTE, message, file=CONFIG)


def _bytes(facts: Facts) -> int:
    return sum(s.entry.nbytes for s in facts.components.values())
