"""Check an msModelSlim folder: files and description here, values of layers in check_layers.py, cache and norms in
check_model.py.

Errors that stop `open` come from survey.py.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator

from polyquant.formats.msmodelslim.check_layers import check_layers
from polyquant.formats.msmodelslim.check_model import check_cache, check_norms
from polyquant.formats.msmodelslim.description import FLOAT
from polyquant.formats.msmodelslim.survey import Survey, survey
from polyquant.formats.side_files import check_side_files
from polyquant.storage.locations import located
from polyquant.types import Finding, Severity

__all__ = ["check", "check_headers"]

ERROR, WARNING, NOTE = Severity.ERROR, Severity.WARNING, Severity.NOTE


def check(path: str | os.PathLike[str]) -> Iterator[Finding]:
    """Findings about a folder. Raises InputError only if `path` does not exist."""
    contents = survey(located(path))
    yield from _headers(contents)
    yield from check_layers(contents)
    yield from check_cache(contents)
    yield from check_norms(contents)


def check_headers(path: str | os.PathLike[str]) -> Iterator[Finding]:
    """The findings of `check` without the values of layers, cache and norms."""
    return _headers(survey(located(path)))


def _headers(contents: Survey) -> Iterator[Finding]:
    for breach in contents.breaches:
        yield breach.finding()
    yield from _config(contents)
    yield from check_side_files(contents.path, no_tokenizer="ASC017", broken="ASC018")
    yield from _index(contents)
    if contents.described:
        yield from _types(contents)
        yield from _check_general(contents)


def _config(contents: Survey) -> Iterator[Finding]:
    if contents.config is None:
        if not any(b.code == "ASC002" for b in contents.breaches):
            yield Finding("ASC001", NOTE, "config.json is missing", file=contents.path.name)
    elif contents.config.get("quantization_config") is not None:
        yield Finding("ASC003", WARNING, "quantization_config is left from another format", file="config.json")


def _index(contents: Survey) -> Iterator[Finding]:
    weight_map = contents.files.weight_map
    for tensor, path in contents.strays:
        stated = (weight_map or {}).get(tensor)
        where = f"weight_map assigns it to {stated}" if stated else "is not in weight_map"
        yield Finding("ASC009", WARNING, where, tensor, path.name)
    total = sum(s.entry.nbytes for s in contents.tensors.values())
    stated_total = contents.files.total_size
    if contents.complete and not contents.strays and stated_total is not None and stated_total != total:
        message = f"total_size is {str(stated_total)[:40]}, the tensors have {total}"
        yield Finding("ASC009", WARNING, message, file=contents.files.index)


def _types(contents: Survey) -> Iterator[Finding]:
    for word, tensors in contents.unknown.items():
        message = f"unknown type {word!r}: {len(tensors)} tensors are kept as stored"
        yield Finding("ASC015", WARNING, message, tensors[0], contents.files.description)
    for tensor in contents.mislabelled:
        if len(contents.tensors[tensor].entry.shape) <= 1:
            message = f"floats described as {contents.word(tensor)}"
            yield Finding("ASC014", NOTE, message, tensor, contents.files.description)


def _check_general(contents: Survey) -> Iterator[Finding]:
    """Compare the keys about the model with the layers."""
    general, file = contents.description.general, contents.files.description
    words = Counter(contents.word(f"{name}.weight") for name in contents.linears)
    kind = general.get("model_quant_type")
    known = {*words, *contents.unknown}
    if kind is None:
        yield Finding("ASC016", WARNING, "model_quant_type is missing", file=file)
    elif not isinstance(kind, str):
        yield Finding("ASC016", ERROR, f"model_quant_type is not a string: {str(kind)[:40]}", file=file)
    elif known and kind not in known and kind != FLOAT and contents.complete:
        yield Finding("ASC016", WARNING, f"model_quant_type is {kind[:40]!r}, but no layer has this type", file=file)
    groups = sorted({x.codec.group for x in contents.linears.values()} - {0})
    size = general.get("group_size")
    if size is not None and (isinstance(size, bool) or not isinstance(size, int)):
        yield Finding("ASC016", ERROR, f"group_size is not an integer: {str(size)[:40]}", file=file)
    elif isinstance(size, int) and size > 0 and groups and groups != [size]:
        actual = ", ".join(map(str, groups))
        yield Finding("ASC016", ERROR, f"group_size is {size}, but the scales are for groups of {actual}", file=file)
