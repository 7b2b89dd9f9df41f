"""Checking a Trellis folder: the document's six checks, sizes, finite scales, headers, and the dialects' defects by name.

What stops `open` comes from survey.py. Of payloads only scales, signs and header bytes are read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from polyquant.formats.beside import check_side_files
from polyquant.formats.trellis.config_check import check_config
from polyquant.formats.trellis.folder import BASE_FILES, INDEX
from polyquant.formats.trellis.model_check import check_model
from polyquant.formats.trellis.payload_check import check_payload
from polyquant.formats.trellis.survey import Survey, axes_of, survey
from polyquant.formats.trellis.weights import Facts
from polyquant.types import Finding, Severity

__all__ = ["check"]

ERROR, WARNING, NOTE = Severity.ERROR, Severity.WARNING, Severity.NOTE


def check(path: str | os.PathLike[str]) -> Iterator[Finding]:
    """Findings about a folder or one shard. Raises InputError only if there is nothing at `path`."""
    path = Path(path)
    found = survey(path)
    for breach in found.breaches:
        yield breach.finding()
    if path.is_dir():
        yield from _config(found)
        yield from check_side_files(path, no_tokenizer="TRL004", broken="TRL005")
        yield from _index(found)
        yield from check_config(found)
        yield from check_model(found)
    axes, _ = axes_of(found, None)
    yield from _dialect(found, list(found.weights.values()))
    yield from check_payload(found, axes)


def _config(found: Survey) -> Iterator[Finding]:
    if found.config is None:
        if not any(b.code == "TRL002" for b in found.breaches):
            yield Finding("TRL001", WARNING, "config.json is missing", file=found.path.name)
        return
    for key, kind in (("model_type", str), ("architectures", list)):
        if not found.config.get(key) or not isinstance(found.config[key], kind):
            yield Finding("TRL003", WARNING, f"no usable {key}", file="config.json")


def _index(found: Survey) -> Iterator[Finding]:
    files = found.files
    for tensor, path in found.strays:
        said = (files.weight_map or {}).get(tensor)
        where = f"weight_map says {said}" if said else "is not in weight_map"
        yield Finding("TRL014", WARNING, f"orphaned: {where}", tensor, path.name)
    for name in files.unused:
        yield Finding("TRL015", WARNING, "nothing names this file: not loaded", file=name)
    for tensor in found.doubled:
        yield Finding("TRL014", WARNING, "is in the shards too, which are used", tensor)
    if files.weight_map is None:
        return
    total, said_total = _indexed_bytes(found), files.metadata.get("total_size")
    if found.whole and said_total is not None and said_total != total:
        message = f"total_size is {str(said_total)[:40]}, the tensors have {total}"
        yield Finding("TRL016", WARNING, message, file=INDEX)
    form = files.metadata.get("format")
    if form != "trellis_v3":
        yield Finding("TRL041", WARNING, f"metadata.format is {str(form)[:40]!r}, not 'trellis_v3'", file=INDEX)
    if " quantization" in files.metadata:
        yield Finding("TRL049", NOTE, "key ' quantization' has a leading space", file=INDEX)


def _indexed_bytes(found: Survey) -> int:
    """Bytes of all tensors that weight_map names."""
    beside = sum(found.plain[n].entry.nbytes for n in found.beside if n in found.plain)
    strays = {tensor for tensor, _ in found.strays}
    loose = sum(s.entry.nbytes for s in found.plain.values() if s.entry.name in strays)
    loose += sum(
        s.entry.nbytes for f in found.weights.values() for s in f.components.values() if s.entry.name in strays
    )
    return found.nbytes - beside - loose


def _dialect(found: Survey, weights: list[Facts]) -> Iterator[Finding]:
    v3 = found.files.version == 3
    if found.underscored and v3:
        yield Finding(
            "TRL040", WARNING, f"{found.underscored} tensors are named with __ for dots", file=found.path.name
        )
    if found.beside and v3:
        names = ", ".join(n for n in BASE_FILES if any(n == name for _, name in found.files.base))
        yield Finding("TRL042", WARNING, f"{len(found.beside)} plain tensors are in no weight_map", file=names)
    if weights and not found.metadata.notes:
        yield Finding("TRL043", WARNING, "no metadata of bits and shapes", file=found.path.name)
    for kind, word in (("tensor", "one header byte"), ("tile", "a header byte in each tile")):
        some = [f for f in weights if f.headers == kind]
        if some and v3:
            yield Finding("TRL044", WARNING, f"{len(some)} weights have {word}", some[0].name, some[0].file.name)
    _, notes = axes_of(found, None)
    for note in notes:
        yield Finding("TRL050", NOTE, note, file=found.path.name)
