"""Check one GGUF file for everything that llama.cpp or another reader rejects, as findings (explained in codes.py)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from polyquant.errors import InputError, printable
from polyquant.formats.gguf.cursor import HeaderError
from polyquant.formats.gguf.dialect import TYPES, detect
from polyquant.formats.gguf.header import Header, read_header
from polyquant.formats.gguf.place import place
from polyquant.formats.gguf.reading import members, split_number
from polyquant.formats.gguf.values import StringArray
from polyquant.storage.source import Source
from polyquant.types import Finding, Kind, Severity

__all__ = ["check"]

_WITH_TOKENS = ("tokenizer.ggml.scores", "tokenizer.ggml.token_type")
_INTEGERS = frozenset(Kind) - {Kind.FLOAT32, Kind.FLOAT64, Kind.BOOL, Kind.STRING, Kind.ARRAY}

_NVFP4, _FLOAT32 = 40, 0


def check(path: str | Path, *, dialect: str | None = None) -> Iterator[Finding]:
    """Findings of a GGUF file, and of the other files if it is part of a split model. Tensor data is not read.

    Raises InputError if there is no readable file at all, UnknownNameError for an unknown dialect.
    """
    source = Source(path)
    try:
        header = read_header(source)
    except HeaderError as e:
        yield Finding(e.code, Severity.ERROR, _reason(e), None, source.path.name)
        return
    _check_file(header, dialect)
    yield from header.findings
    yield from _check_members(header, dialect)


def _reason(e: InputError) -> str:
    details = [f"{word} {printable(x)}" for word, x in (("expected", e.expected), ("found", e.found)) if x is not None]
    return e.message + (f" ({', '.join(details)})" if details else "")


def _check_file(header: Header, dialect: str | None) -> None:
    """Run all checks of one file, into header.findings."""
    findings = header.findings
    if header.version == 1:
        findings.warning("GGUF024", "GGUF version 1")
    elif header.version == 2:
        findings.note("GGUF025", "GGUF version 2")
    if header.order == ">":
        findings.warning("GGUF026", "the file is big-endian")
    if not header.tensors:
        findings.note("GGUF036", "the file contains no tensors")
    evidence = detect(header, dialect)
    place(header, evidence.name)
    if any(t.type_id == 36 for t in header.tensors) and TYPES[evidence.name].get(36) == TYPES["bitnet"][36]:
        findings.note("GGUF034", "I2_S weights: the file does not specify the x86 or the ARM layout")
    if TYPES[evidence.name].get(_NVFP4) == TYPES["mainline"][_NVFP4]:
        _check_scales(header)
    _check_architecture(header)
    _check_values(header)
    _check_tokenizer(header)


def _check_scales(header: Header) -> None:
    """Check the scales next to NVFP4 weights."""
    tensors = {t.name: t for t in header.tensors}
    for t in header.tensors:
        count = t.shape[0] if len(t.shape) == 3 else 1
        for key in ("scale", "input_scale") if t.type_id == _NVFP4 and t.name.endswith(".weight") else ():
            scale = tensors.get(t.name.removesuffix("weight") + key)
            if scale is not None and (scale.type_id, scale.shape) != (_FLOAT32, (count,)):
                header.findings.warning("GGUF037", f"{key} {list(scale.shape)}, not float32 [{count}]", t.name)


def _check_architecture(header: Header) -> None:
    entry = header.entries.get("general.architecture")
    if entry is None:
        if not split_number(header, "split.no"):  # later files of a split model have no metadata
            header.findings.warning("GGUF027", "general.architecture is missing")
    elif entry.kind is not Kind.STRING:
        header.findings.error("GGUF027", f"general.architecture is a {entry.kind.name.lower()}, not a string")


def _check_values(header: Header) -> None:
    """Check for text that is not UTF-8 and bools other than 0 and 1."""
    buffer = header.buffer
    for key, entry in header.entries.items():
        if entry.kind is Kind.BOOL and buffer[entry.start] > 1:
            header.findings.warning("GGUF030", f"'{printable(key)}' is the bool {int(buffer[entry.start])}")
        if entry.item is Kind.BOOL and entry.count and (buffer[entry.end - entry.count : entry.end] > 1).any():
            header.findings.warning("GGUF030", f"'{printable(key)}' contains bools other than 0 and 1")
        if entry.kind is Kind.STRING or entry.item in (Kind.STRING, Kind.ARRAY):
            try:
                valid = _is_text(header.typed(key).value)
            except InputError:
                valid = False
            if not valid:
                header.findings.warning("GGUF029", f"the text of '{printable(key)}' is not UTF-8")


def _is_text(value: object) -> bool:
    """True if all text in an array, and in arrays inside it, is UTF-8."""
    if isinstance(value, StringArray):
        return value.is_text()
    return not isinstance(value, tuple) or all(_is_text(item) for item in value)


def _check_tokenizer(header: Header) -> None:
    tokens = header.entries.get("tokenizer.ggml.tokens")
    if tokens is None or tokens.item is not Kind.STRING:
        return
    for key in _WITH_TOKENS:
        entry = header.entries.get(key)
        if entry is not None and entry.count != tokens.count:
            header.findings.error("GGUF028", f"{entry.count} entries in {key}, but {tokens.count} tokens")
    for key, entry in header.entries.items():
        if key.startswith("tokenizer.ggml.") and key.endswith("_token_id") and entry.kind in _INTEGERS:
            number = int(header.typed(key).value)
            if number >= tokens.count and number not in (0xFFFFFFFF, -1):  # -1: no such token
                header.findings.warning("GGUF033", f"{printable(key)} is {number}, but there are {tokens.count} tokens")


def _check_members(header: Header, dialect: str | None) -> Iterator[Finding]:
    """Check the other files of a split model: present, consistent, and their own findings."""

    def misfit(message: str, file: Path) -> Finding:
        return Finding("GGUF032", Severity.ERROR, message, None, file.name)

    own = header.source.path
    try:
        paths = members(header)
    except InputError as e:
        yield misfit(_reason(e), own)
        return
    seen = {t.name: own for t in header.tensors}
    for no, path in enumerate(paths):
        other = header
        if path != own:
            try:
                other = read_header(Source(path))
            except InputError as e:
                code = e.code if isinstance(e, HeaderError) else "GGUF032"
                yield Finding(code, Severity.ERROR, _reason(e), None, path.name)
                continue
            _check_file(other, dialect)
            yield from other.findings
            for t in other.tensors:
                if t.name in seen:
                    yield Finding(
                        "GGUF032", Severity.ERROR, f"the tensor is also in {seen[t.name].name}", t.name, path.name
                    )
                seen[t.name] = path
        numbers = (split_number(other, "split.no"), split_number(other, "split.count"))
        if len(paths) > 1 and numbers != (no, len(paths)):
            yield misfit(f"split.no and split.count are {numbers}, but the file name implies {(no, len(paths))}", path)
    total = split_number(header, "split.tensors.count") if len(paths) > 1 else None
    if total is not None and total != len(seen):
        yield misfit(f"split.tensors.count is {total}, but the files contain {len(seen)} tensors", own)
