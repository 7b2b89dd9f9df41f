"""Opening msModelSlim folders of every dialect: headers and JSON only.

A quantized layer X is one weight "X.weight" of a codec MsModelSlim whose parts lie in the files as X.weight, X.weight_scale, ...; everything else stays a
weight of its own name: biases, norms with their twins `.module.*`, scales of the cache, and tensors of types that are not known.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from polyquant.errors import printable
from polyquant.formats.msmodelslim.description import CACHE_PARTS, FLOAT, split
from polyquant.formats.msmodelslim.folder import descriptions, weight_stems
from polyquant.formats.msmodelslim.survey import Linear, Survey, survey
from polyquant.formats.stored import plain_weight
from polyquant.storage import folder as folders
from polyquant.types import Checkpoint, Evidence, Weight

__all__ = ["fallback", "open", "sniff"]


def sniff(path: str | os.PathLike[str]) -> Evidence | None:
    """Evidence that this is an msModelSlim folder, by its files; None if not."""
    path = Path(path)
    if not path.is_dir():
        return None
    names = folders.entries(path)
    if found := descriptions(names):
        return Evidence("msmodelslim", f"folder with {found[0]}")
    stems = weight_stems(names)
    return Evidence("msmodelslim", f"folder with {stems[0]}.safetensors, and no description") if stems else None


def open(path: str | os.PathLike[str]) -> Checkpoint:
    """The folder as a checkpoint. Raises InputError with the first thing that is wrong."""
    path = Path(path)
    found = survey(path)
    for breach in found.breaches:
        if breach.stops:
            raise breach.error()
    weights = {n: plain_weight(n, s) for n, s in found.plain.items()} | {
        f"{x.name}.weight": _quantized(x) for x in found.linears.values()
    }
    ordered = {name: weights[name] for name in _file_order(found)}
    side = {n: file for n in folders.SIDE_FILES if (file := folders.member(path, n)) is not None}
    types = {tensor: found.word(tensor) for tensor in found.tensors if found.word(tensor) is not None}
    metadata: dict[str, Any] = {k: v for k, v in found.description.whole.items() if k not in found.tensors}
    dialect, why = found.dialect
    return Checkpoint(
        "msmodelslim", path, ordered, metadata | {"types": types}, found.config or {}, side, Evidence(dialect, why),
        tuple(_notes(found)), describes_itself=True,
    )  # fmt: skip


def _quantized(linear: Linear) -> Weight:
    arrays = {}
    for part, spec in linear.codec.specs(linear.shape).items():
        stored = linear.parts[part]
        arrays[part] = stored.entry.array(stored.source, spec)
    return Weight(f"{linear.name}.weight", linear.shape, linear.codec, arrays)


def _file_order(found: Survey) -> list[str]:
    """Names by file and offset; of a quantized layer, that of its codes."""
    files = {found.path / name: i for i, name in enumerate(found.files.names)}
    first = dict(found.plain) | {f"{x.name}.weight": x.parts["weight"] for x in found.linears.values()}
    return sorted(first, key=lambda n: (files[first[n].source.path], first[n].entry.offset))


def fallback(found: Survey) -> list[str]:
    """Linear layers that were left float: matrices inside the layers of the model, or of a name that is quantized elsewhere."""
    if not found.linears:
        return []
    roles = {_role(name) for name in found.linears}
    inner = re.compile(r"(?:^|\.)(?:layers|blocks|h)\.\d+\.")
    return [
        name.removesuffix(".weight")
        for name, s in found.plain.items()
        if name.endswith(".weight") and len(s.entry.shape) == 2 and found.word(name) == FLOAT
        if _role(name.removesuffix(".weight")) in roles or inner.search(name)
    ]


def _role(name: str) -> str:
    """The name without its numbers."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def _notes(found: Survey) -> Iterator[str]:
    yield from found.files.notes
    if found.config is None:
        yield "config.json is missing"
    elif found.config.get("quantization_config") is not None:
        yield "config.json still has a quantization_config, which the weights are not in"
    if left := fallback(found):
        yield f"{len(left)} linear layer{'s' * (len(left) > 1)} left float: {_some(left)}"
    yield from _smoothing_and_cache(found)
    for word, tensors in found.unknown.items():
        yield f"type '{printable(word, 40)}' is not known: {len(tensors)} tensors are kept as stored, e.g. {printable(tensors[0])}"
    if found.mislabelled:
        yield f"{len(found.mislabelled)} float tensors are said to be quantized, e.g. {printable(found.mislabelled[0])}"
    if found.strays:
        yield f"{len(found.strays)} tensors are not where weight_map says, e.g. {printable(found.strays[0][0])}"
    floating = [t for t in found.undescribed if t in found.plain]
    if floating:
        yield f"{len(floating)} tensors have no type in the description, e.g. {printable(floating[0])}"
    if found.absent:
        yield f"{len(found.absent)} tensors of the description are in no file, e.g. {printable(found.absent[0])}"


def _smoothing_and_cache(found: Survey) -> Iterator[str]:
    layers = [split(n) for n in found.plain]
    cached = {split(layer)[0] for layer, part in layers if part in CACHE_PARTS}
    if cached:
        yield f"the cache is quantized to 8 bits (C8) in {len(cached)} layers"
    twins = {layer.removesuffix(".module") for layer, _ in layers if layer.endswith(".module")}
    biased = {layer for layer, part in layers if part == "bias" and layer.endswith("norm")}
    if twins or biased:
        how = f", {len(twins)} with a twin norm.module" if twins else ""
        yield f"smoothed: {len(biased | twins)} norms have a bias{how}"


def _some(names: list[str]) -> str:
    return ", ".join(printable(n) for n in names[:3]) + ("…" if len(names) > 3 else "")
