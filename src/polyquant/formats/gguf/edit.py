"""Editing metadata (and tensor names) without touching tensor data.

Unchanged values are carried byte for byte. A file of version 1 or 2 becomes version 3; the byte order stays. In place, a change that
stays within one memory page and moves nothing is one positioned write; anything else goes through a temporary file beside the target,
which the kernel fills with the tensor data, and one rename: a kill at any moment leaves the old file or the new one.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from polyquant.errors import InputError, PlanError, UnknownNameError, printable
from polyquant.formats.gguf.dialect import detect
from polyquant.formats.gguf.header import Header, read_header
from polyquant.formats.gguf.layout import encode_entry, encode_header, encode_key, encode_tensor
from polyquant.formats.gguf.place import place
from polyquant.formats.gguf.settings import parse_value
from polyquant.storage.source import Source
from polyquant.storage.staging import sync_folder
from polyquant.types import Kind, Meta

__all__ = ["Edited", "edit"]

_PAGE = 4096
_TYPED_HINT = "write key:type=value, e.g. general.name:str=Llama"


@dataclass(frozen=True, slots=True)
class Edited:
    """What an edit did: the file, its size, and how: "unchanged", "in place" (one write), "rewritten" (temporary file) or "copied"."""

    path: Path
    nbytes: int
    how: str


def edit(
    src: str | Path,
    dst: str | Path | None = None,
    *,
    set: Mapping[str, Meta | Any] | None = None,
    remove: Iterable[str] = (),
    rename: Mapping[str, str] | None = None,
    rename_tensor: Mapping[str, str] | None = None,
    overwrite: bool = False,
) -> Edited:
    """Change metadata of one GGUF file, in place or (dst) into a copy. First remove, then rename, then set.

    set: key -> Meta, or text or a Python value that takes the type the key already has. A key keeps its type unless it is in `remove`
    too. Raises UnknownNameError for keys or tensors that are not there, PlanError for what cannot be written or would move tensor data
    (general.alignment), InputError for broken files.
    """
    source = Source(Path(src).resolve() if dst is None else src)
    header = _sound(source)
    entries = _entries(header, set or {}, tuple(remove), rename or {})
    tensors = _tensors(header, rename_tensor or {})
    raw = encode_header(tensors, entries, header.alignment, header.order)
    target = source.path if dst is None else Path(dst)
    if dst is not None and target.exists():
        if target.samefile(source.path):
            raise PlanError("the target is the source", file=target, hint="leave the target out to edit in place")
        if not overwrite:
            raise PlanError("the target exists", file=target, hint="choose another name, or ask to overwrite it")
    if dst is None and (how := _write_in_place(header, raw)):
        return Edited(target, source.size, how)
    size = _rewrite(header, raw, target, in_place=dst is None)
    return Edited(target, size, "rewritten" if dst is None else "copied")


def _sound(source: Source) -> Header:
    """The header of a file without errors. Raises InputError otherwise; too long tensor names may be renamed."""
    header = read_header(source)
    place(header, detect(header).name)
    error = next((f for f in header.findings if f.severity.value == "error" and f.code != "GGUF013"), None)
    if error is not None:
        raise InputError(error.message, file=source.path, tensor=error.tensor, hint=f"`polyquant explain {error.code}`")
    return header


def _entries(
    header: Header, changes: Mapping[str, Any], remove: tuple[str, ...], rename: Mapping[str, str]
) -> list[bytes]:
    """The encoded metadata after the change, in file order, new keys last."""
    for key in (*remove, *rename):
        if key not in header.entries:
            raise UnknownNameError("key in this file", key, header.entries)
    kept = [(rename.get(key, key), key) for key in header.entries if key not in remove]
    names = [new for new, _ in kept]
    for new in rename.values():
        if names.count(new) > 1:
            raise PlanError(f"two keys would be called '{printable(new)}'", file=header.source.path)
    touched = {*remove, *rename, *rename.values(), *changes}
    if "general.alignment" in touched and header.tensors:
        raise PlanError(
            "general.alignment fixes where tensor data lie: it cannot be edited",
            file=header.source.path,
            hint="convert the file instead",
        )
    out = []
    for new, old in kept:
        if new in changes:
            entry = header.entries[old]
            out.append(encode_entry(new, _value(new, changes[new], entry.kind, entry.item), header.order))
        else:
            out.append(_carried(header, new, old))
    out += [
        encode_entry(key, _value(key, v, None, None), header.order) for key, v in changes.items() if key not in names
    ]
    return out


def _value(key: str, value: Any, kind: Kind | None, item: Kind | None) -> Meta:
    """What is to be written for a key that has (kind, item) now, or None if it is new."""
    if isinstance(value, Meta):
        if kind is not None and (value.kind, value.item) != (kind, item):
            raise PlanError(
                f"'{printable(key)}' has another type",
                expected=_shown(kind, item),
                found=_shown(value.kind, value.item),
                hint="leave the type out, or remove the key in the same edit to change its type",
            )
        return value
    if kind is None:
        raise PlanError(f"'{printable(key)}' is not in the file, so its value needs a type", hint=_TYPED_HINT)
    if isinstance(value, str) and kind is not Kind.STRING:
        return parse_value(key, value, kind, item)
    return Meta(kind, value, item)


def _shown(kind: Kind, item: Kind | None) -> str:
    return kind.name.lower() if item is None else f"array of {item.name.lower()}"


def _carried(header: Header, new: str, old: str) -> bytes:
    """An entry whose value does not change. Version 1 has other lengths, so its values are read and written."""
    if not header.wide:
        return encode_entry(new, header.typed(old), header.order)
    kind = np.array([header.entries[old].kind], header.order + "u4").tobytes()
    return encode_key(new, header.order) + kind + header.value_bytes(old)


def _tensors(header: Header, rename: Mapping[str, str]) -> list[bytes]:
    names = [t.name for t in header.tensors]
    for name in rename:
        if name not in names:
            raise UnknownNameError("tensor in this file", name, names)
    after = [rename.get(n, n) for n in names]
    if len({*after}) != len(after):
        raise PlanError("two tensors would have the same name", file=header.source.path)
    return [
        encode_tensor(n, t.shape, t.type_id, t.offset, header.order) for n, t in zip(after, header.tensors, strict=True)
    ]


def _write_in_place(header: Header, raw: bytes) -> str | None:
    """One write of the bytes that differ, if nothing moves and they lie in one page. None if that cannot be."""
    source = header.source
    if len(raw) != header.data or (not header.tensors and len(raw) != source.size):
        return None
    old = np.frombuffer(source.pread(0, len(raw)).tobytes(), np.uint8)
    differ = np.flatnonzero(old != np.frombuffer(raw, np.uint8))
    if not len(differ):
        return "unchanged"
    start, stop = int(differ[0]), int(differ[-1]) + 1
    if start // _PAGE != (stop - 1) // _PAGE:
        return None
    try:
        fd = os.open(source.path, os.O_WRONLY | os.O_CLOEXEC)
    except OSError as e:
        raise PlanError(f"cannot be written: {e.strerror}", file=source.path) from e
    try:
        os.pwrite(fd, raw[start:stop], start)
        os.fsync(fd)
    finally:
        os.close(fd)
    return "in place"


def _rewrite(header: Header, raw: bytes, target: Path, *, in_place: bool) -> int:
    """Header and data into a temporary file beside the target, synced, then renamed. Gives the size."""
    source, folder = header.source, target.parent
    try:
        fd, temporary = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=folder)
    except OSError as e:
        raise PlanError(f"cannot be written: {e.strerror}", file=target) from e
    try:
        try:
            _write_all(fd, raw)
            start = header.data if header.tensors else source.size
            _copy(source, start, fd)
            size = os.lseek(fd, 0, os.SEEK_CUR)
            size += _write_all(fd, bytes(-(size - len(raw)) % header.alignment)) if header.tensors else 0
            os.fchmod(fd, os.fstat(source.fileno()).st_mode & 0o7777 if in_place else 0o666 & ~_umask())
            os.fsync(fd)
        finally:
            os.close(fd)
        read_header(Source(temporary))  # what we wrote is what we meant to write
        Path(temporary).replace(target)
    except OSError as e:
        raise PlanError(f"cannot be written: {e.strerror}", file=target) from e
    finally:
        Path(temporary).unlink(missing_ok=True)  # there is none after the rename
    sync_folder(folder)
    return size


def _write_all(fd: int, raw: bytes) -> int:
    """All of it; gives its size."""
    view = memoryview(raw)
    while view:
        view = view[os.write(fd, view) :]
    return len(raw)


def _copy(source: Source, at: int, fd: int) -> None:
    """Everything from `at` on, inside the kernel where it can be. Raises InputError if the source shrinks meanwhile."""
    inside = getattr(os, "copy_file_range", None)
    while at < source.size:
        n = 0
        if inside is not None:
            try:
                n = inside(source.fileno(), fd, min(1 << 30, source.size - at), at)
            except OSError:  # another file system, or one that cannot
                inside = None
        if inside is None:
            n = _write_all(fd, os.pread(source.fileno(), min(1 << 24, source.size - at), at))
        if n == 0:
            raise InputError("shrank while it was copied", file=source.path, found=f"end at byte {at}")
        at += n


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
