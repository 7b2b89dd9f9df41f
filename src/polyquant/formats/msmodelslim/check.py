"""Checking an msModelSlim folder: files and description here, the numbers of the layers in check_layers.py, cache and norms in check_model.py.

What stops `open` comes from survey.py.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from polyquant.formats.side_files import check_side_files
from polyquant.formats.msmodelslim.check_layers import check_layers
from polyquant.formats.msmodelslim.check_model import check_cache, check_norms
from polyquant.formats.msmodelslim.description import FLOAT
from polyquant.formats.msmodelslim.survey import Survey, survey
from polyquant.types import Finding, Severity

__all__ = ["check"]

ERROR, WARNING, NOTE = Severity.ERROR, Severity.WARNING, Severity.NOTE


def check(path: str | os.PathLike[str]) -> Iterator[Finding]:
    """Findings about a folder. Raises InputError only if there is nothing at `path`."""
    found = survey(Path(path))
    for breach in found.breaches:
        yield breach.finding()
    yield from _config(found)
    yield from check_side_files(found.path, no_tokenizer="ASC017", broken="ASC018")
    yield from _index(found)
    if found.described:
        yield from _types(found)
        yield from _whole(found)
    yield from check_layers(found)
    yield from check_cache(found)
    yield from check_norms(found)


def _config(found: Survey) -> Iterator[Finding]:
    if found.config is None:
        if not any(b.code == "ASC002" for b in found.breaches):
            yield Finding("ASC001", NOTE, "config.json is missing", file=found.path.name)
    elif found.config.get("quantization_config") is not None:
        yield Finding("ASC003", WARNING, "quantization_config is left from another format", file="config.json")


def _index(found: Survey) -> Iterator[Finding]:
    weight_map = found.files.weight_map
    for tensor, path in found.strays:
        said = (weight_map or {}).get(tensor)
        where = f"weight_map says {said}" if said else "is not in weight_map"
        yield Finding("ASC009", WARNING, where, tensor, path.name)
    total = sum(s.entry.nbytes for s in found.tensors.values())
    said_total = found.files.total_size
    if found.whole and not found.strays and said_total is not None and said_total != total:
        message = f"total_size is {str(said_total)[:40]}, the tensors have {total}"
        yield Finding("ASC009", WARNING, message, file=found.files.index)


def _types(found: Survey) -> Iterator[Finding]:
    for word, tensors in found.unknown.items():
        message = f"type {word!r} is not known: {len(tensors)} tensors are kept as stored"
        yield Finding("ASC015", WARNING, message, tensors[0], found.files.description)
    for tensor in found.mislabelled:
        if len(found.tensors[tensor].entry.shape) <= 1:
            message = f"floats that are said to be {found.word(tensor)}"
            yield Finding("ASC014", NOTE, message, tensor, found.files.description)


def _whole(found: Survey) -> Iterator[Finding]:
    """Keys about the whole model against the layers."""
    whole, file = found.description.whole, found.files.description
    words = Counter(found.word(f"{name}.weight") for name in found.linears)
    said = whole.get("model_quant_type")
    known = {*words, *found.unknown}
    if said is None:
        yield Finding("ASC016", WARNING, "model_quant_type is missing", file=file)
    elif not isinstance(said, str):
        yield Finding("ASC016", ERROR, f"model_quant_type is no string: {str(said)[:40]}", file=file)
    elif known and said not in known and said != FLOAT and found.whole:
        yield Finding("ASC016", WARNING, f"model_quant_type is {said[:40]!r}, and no layer is", file=file)
    groups = sorted({x.codec.group for x in found.linears.values()} - {0})
    size = whole.get("group_size")
    if size is not None and (isinstance(size, bool) or not isinstance(size, int)):
        yield Finding("ASC016", ERROR, f"group_size is no integer: {str(size)[:40]}", file=file)
    elif isinstance(size, int) and size > 0 and groups and groups != [size]:
        found_groups = ", ".join(map(str, groups))
        yield Finding("ASC016", ERROR, f"group_size is {size}, the scales are for groups of {found_groups}", file=file)
