"""Open msModelSlim folders of all dialects; reads headers and JSON only.

A quantized layer X is one weight "X.weight" with a codec MsModelSlim and the parts X.weight, X.weight_scale, ...; every
other tensor is a separate weight: biases, norms with their copies `.module.*`, scales of the cache, and tensors of
unknown types.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

from polyquant.errors import printable
from polyquant.formats.msmodelslim.description import CACHE_PARTS, FLOAT, split
from polyquant.formats.msmodelslim.sniff import sniff
from polyquant.formats.msmodelslim.survey import Linear, Survey, survey
from polyquant.formats.stored import plain_weight
from polyquant.storage import folder as folders
from polyquant.storage.locations import located
from polyquant.types import Checkpoint, Evidence, Weight

__all__ = ["open", "sniff", "unquantized_linears"]


def open(path: str | os.PathLike[str]) -> Checkpoint:
    """Open the folder. Raises InputError with the first error."""
    path = located(path)
    contents = survey(path)
    for breach in contents.breaches:
        if breach.stops:
            raise breach.error()
    weights = {n: plain_weight(n, s) for n, s in contents.plain.items()} | {
        f"{x.name}.weight": _quantized(x) for x in contents.linears.values()
    }
    ordered = {name: weights[name] for name in _file_order(contents)}
    side = {n: file for n in folders.SIDE_FILES if (file := folders.member(path, n)) is not None}
    types = {tensor: contents.word(tensor) for tensor in contents.tensors if contents.word(tensor) is not None}
    metadata: dict[str, Any] = {k: v for k, v in contents.description.general.items() if k not in contents.tensors}
    dialect, why = contents.dialect
    return Checkpoint(
        "msmodelslim", path, ordered, metadata | {"types": types}, contents.config or {}, side, Evidence(dialect, why),
        tuple(_notes(contents)), describes_itself=True,
    )  # fmt: skip


def _quantized(linear: Linear) -> Weight:
    arrays = {}
    for part, spec in linear.codec.specs(linear.shape).items():
        stored = linear.parts[part]
        arrays[part] = stored.entry.array(stored.source, spec)
    return Weight(f"{linear.name}.weight", linear.shape, linear.codec, arrays)


def _file_order(contents: Survey) -> list[str]:
    """Names in order of file and offset; a quantized layer is at the position of its codes."""
    files = {contents.path / name: i for i, name in enumerate(contents.files.names)}
    first = dict(contents.plain) | {f"{x.name}.weight": x.parts["weight"] for x in contents.linears.values()}
    return sorted(first, key=lambda n: (files[first[n].source.path], first[n].entry.offset))


def unquantized_linears(contents: Survey) -> list[str]:
    """Linear layers left as floats: matrices inside the model's layers, or with a role that is quantized elsewhere."""
    if not contents.linears:
        return []
    roles = {_role(name) for name in contents.linears}
    inner = re.compile(r"(?:^|\.)(?:layers|blocks|h)\.\d+\.")
    return [
        name.removesuffix(".weight")
        for name, s in contents.plain.items()
        if name.endswith(".weight") and len(s.entry.shape) == 2 and contents.word(name) == FLOAT
        if _role(name.removesuffix(".weight")) in roles or inner.search(name)
    ]


def _role(name: str) -> str:
    """The name with layer numbers replaced by "*"."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def _notes(contents: Survey) -> Iterator[str]:
    yield from contents.files.notes
    if contents.config is None:
        yield "config.json is missing"
    elif contents.config.get("quantization_config") is not None:
        yield "config.json still has a quantization_config that does not describe the weights"
    if left := unquantized_linears(contents):
        yield f"{len(left)} linear layer{'s' * (len(left) > 1)} left float: {_some(left)}"
    yield from _smoothing_and_cache(contents)
    for word, tensors in contents.unknown.items():
        kept = f"{len(tensors)} tensors are kept as stored, e.g. {printable(tensors[0])}"
        yield f"unknown type '{printable(word, 40)}': {kept}"
    if contents.mislabelled:
        first = printable(contents.mislabelled[0])
        yield f"{len(contents.mislabelled)} float tensors are described as quantized, e.g. {first}"
    if contents.strays:
        first = printable(contents.strays[0][0])
        yield f"{len(contents.strays)} tensors are not in the file named by weight_map, e.g. {first}"
    floating = [t for t in contents.undescribed if t in contents.plain]
    if floating:
        yield f"{len(floating)} tensors have no type in the description, e.g. {printable(floating[0])}"
    if contents.absent:
        yield f"{len(contents.absent)} tensors of the description are missing, e.g. {printable(contents.absent[0])}"


def _smoothing_and_cache(contents: Survey) -> Iterator[str]:
    layers = [split(n) for n in contents.plain]
    cached = {split(layer)[0] for layer, part in layers if part in CACHE_PARTS}
    if cached:
        yield f"the cache is quantized to 8 bits (C8) in {len(cached)} layers"
    copies = {layer.removesuffix(".module") for layer, _ in layers if layer.endswith(".module")}
    biased = {layer for layer, part in layers if part == "bias" and layer.endswith("norm")}
    if copies or biased:
        how = f", {len(copies)} with a copy norm.module" if copies else ""
        yield f"smoothed: {len(biased | copies)} norms have a bias{how}"


def _some(names: list[str]) -> str:
    return ", ".join(printable(n) for n in names[:3]) + ("…" if len(names) > 3 else "")
