"""Check a Trellis folder: the document's six checks, sizes, finite scales, headers, and known defects of the dialects.

Errors that stop `open` come from survey.py. Of payloads only scales, signs and header bytes are read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from polyquant.errors import InputError
from polyquant.formats.side_files import check_side_files
from polyquant.formats.trellis.config_check import check_config
from polyquant.formats.trellis.folder import BASE_FILES, INDEX
from polyquant.formats.trellis.model_check import check_model
from polyquant.formats.trellis.payload_check import check_payload
from polyquant.formats.trellis.survey import Survey, axes_of, survey
from polyquant.formats.trellis.weights import Facts
from polyquant.storage import strict_json
from polyquant.storage.folder import member
from polyquant.storage.locations import located
from polyquant.types import Finding, Severity

__all__ = ["check", "check_headers"]

ERROR, WARNING, NOTE = Severity.ERROR, Severity.WARNING, Severity.NOTE
_LAYER = re.compile(r"(?:^|\.)layers\.(\d{1,9})\.")


def check(path: str | os.PathLike[str]) -> Iterator[Finding]:
    """Findings about a folder or one shard. Raises InputError only if `path` does not exist."""
    contents = survey(located(path))
    yield from _headers(contents)
    if contents.path.is_dir():
        yield from check_model(contents)
    axes, _ = axes_of(contents, None)
    yield from check_payload(contents, axes)


def check_headers(path: str | os.PathLike[str]) -> Iterator[Finding]:
    """The findings of `check` without payloads, and without those about missing tensors."""
    return _headers(survey(located(path)))


def _headers(contents: Survey) -> Iterator[Finding]:
    path = contents.path
    for breach in contents.breaches:
        yield breach.finding()
    if path.is_dir():
        yield from _config(contents)
        yield from check_side_files(path, no_tokenizer="TRL004", broken="TRL005")
        yield from _index(contents)
        yield from _layers(contents)
        yield from check_config(contents)
    yield from _dialect(contents, list(contents.weights.values()))


def _config(contents: Survey) -> Iterator[Finding]:
    if contents.config is None:
        if not any(b.code == "TRL002" for b in contents.breaches):
            yield Finding("TRL001", WARNING, "config.json is missing", file=contents.path.name)
        return
    for key, kind in (("model_type", str), ("architectures", list)):
        if not contents.config.get(key) or not isinstance(contents.config[key], kind):
            yield Finding("TRL003", WARNING, f"no usable {key}", file="config.json")


def _index(contents: Survey) -> Iterator[Finding]:
    files = contents.files
    for tensor, path in contents.strays:
        stated = (files.weight_map or {}).get(tensor)
        where = f"weight_map assigns it to {stated}" if stated else "is not in weight_map"
        yield Finding("TRL014", WARNING, f"orphaned: {where}", tensor, path.name)
    for name in files.unused:
        yield Finding("TRL015", WARNING, "not in the index and not loaded", file=name)
    for tensor in contents.duplicates:
        yield Finding("TRL014", WARNING, "is also in the shards, which are used", tensor)
    if files.weight_map is None:
        return
    total, stated_total = _indexed_bytes(contents), files.metadata.get("total_size")
    if contents.complete and stated_total is not None and stated_total != total:
        message = f"total_size is {str(stated_total)[:40]}, the tensors have {total}"
        yield Finding("TRL016", WARNING, message, file=INDEX)
    form = files.metadata.get("format")
    if form != "trellis_v3":
        yield Finding("TRL041", WARNING, f"metadata.format is {str(form)[:40]!r}, not 'trellis_v3'", file=INDEX)
    if " quantization" in files.metadata:
        yield Finding("TRL049", NOTE, "key ' quantization' has a leading space", file=INDEX)


def _layers(contents: Survey) -> Iterator[Finding]:
    """Compare the number in the name of each v2 layer folder with its index and its tensors."""
    strays: dict[Path, list[str]] = {folder: [] for folder in contents.files.layers}
    for name, facts in contents.weights.items():
        folder, layer = facts.file.parent, _LAYER.search(name)
        if folder in strays and layer is not None and int(layer[1]) != _number(folder):
            strays[folder].append(name)
    for folder, names in strays.items():
        number, index = _number(folder), member(folder, "index.json")
        if index is not None:
            try:
                content = strict_json.typed(strict_json.read(index, strict_json.INDEX), dict, index.name)
                stated = content.get("layer_idx")
            except InputError:
                stated = None  # TRL031
            if stated is not None and stated != number:
                message = f"layer_idx is {str(stated)[:40]}, the folder is {folder.name}"
                yield Finding("TRL009", ERROR, message, file=f"{folder.name}/{index.name}")
        if names:
            message = f"{len(names)} weights of another layer are in {folder.name}"
            yield Finding("TRL009", ERROR, message, names[0], folder.name)


def _number(folder: Path) -> int:
    return int(folder.name.removeprefix("layer_"))


def _indexed_bytes(contents: Survey) -> int:
    """Bytes of all tensors in weight_map."""
    unindexed = sum(contents.plain[n].entry.nbytes for n in contents.unindexed if n in contents.plain)
    strays = {tensor for tensor, _ in contents.strays}
    loose = sum(s.entry.nbytes for s in contents.plain.values() if s.entry.name in strays)
    loose += sum(
        s.entry.nbytes for f in contents.weights.values() for s in f.components.values() if s.entry.name in strays
    )
    return contents.nbytes - unindexed - loose


def _dialect(contents: Survey, weights: list[Facts]) -> Iterator[Finding]:
    v3 = contents.files.version == 3
    if contents.underscored and v3:
        yield Finding(
            "TRL040",
            WARNING,
            f"{contents.underscored} tensors are named with __ instead of dots",
            file=contents.path.name,
        )
    if contents.unindexed and v3:
        names = ", ".join(n for n in BASE_FILES if any(n == name for _, name in contents.files.base))
        yield Finding("TRL042", WARNING, f"{len(contents.unindexed)} plain tensors are not in weight_map", file=names)
    if weights and not contents.metadata.notes:
        yield Finding("TRL043", WARNING, "no metadata with bits and shapes", file=contents.path.name)
    for kind, word in (("tensor", "one header byte"), ("tile", "a header byte per tile")):
        some = [f for f in weights if f.headers == kind]
        if some and v3:
            yield Finding("TRL044", WARNING, f"{len(some)} weights have {word}", some[0].name, some[0].file.name)
    _, notes = axes_of(contents, None)
    for note in notes:
        yield Finding("TRL050", NOTE, note, file=contents.path.name)
