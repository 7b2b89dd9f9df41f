"""Editing metadata (and tensor names) without touching tensor data.

Unchanged values are carried byte for byte. A file of version 1 or 2 becomes version 3; the byte order stays. In place, a change that
stays within one memory page and moves nothing is one positioned write; anything else goes through a file in a work folder beside the target,
which the kernel fills with the tensor data, and one rename: a kill at any moment leaves the old file or the new one, and the next edit removes
what a killed one left. Edits in place of one file wait for each other.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from polyquant.errors import InputError, PlanError, UnknownNameError, printable
from polyquant.formats.existing import refuse_target, replaceable
from polyquant.formats.gguf.dialect import detect
from polyquant.formats.gguf.header import Header, read_header
from polyquant.formats.gguf.layout import encode_entry, encode_header, encode_key, encode_tensor
from polyquant.formats.gguf.place import place
from polyquant.formats.gguf.settings import parse_value
from polyquant.storage.source import FileState, Source, opened_files, refuse_changed
from polyquant.storage.work_folder import FILES, claimed
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
    path = Path(src).resolve() if dst is None else Path(src)
    if dst is not None:
        refuse_target(Path(dst), path, overwrite=overwrite)
    with _alone(path) if dst is None else nullcontext():
        with opened_files() as opened:
            source = Source(path)
        header = _sound(source)
        entries = _entries(header, set or {}, tuple(remove), rename or {})
        tensors = _tensors(header, rename_tensor or {})
        raw = encode_header(tensors, entries, header.alignment, header.order)
        if dst is None and (how := _write_in_place(header, raw)):
            return Edited(path, source.size, how)
        target = path if dst is None else Path(dst)
        size = _rewrite(header, raw, target, opened, in_place=dst is None, overwrite=overwrite)
        return Edited(target, size, "rewritten" if dst is None else "copied")


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Waits until no other edit is at work on the file. Raises InputError if it cannot be opened."""
    while True:
        Source(path).close()  # says in our words what is wrong with it
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            if os.path.samestat(os.fstat(fd), path.stat()):
                yield
                return
        finally:
            os.close(fd)  # an edit that we waited for has put another file here: lock that one


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


def _rewrite(
    header: Header, raw: bytes, target: Path, opened: Mapping[Path, FileState], *, in_place: bool, overwrite: bool
) -> int:
    """Header and data into a file in a work folder, synced, then renamed. Gives the size."""
    target = target.absolute()
    try:
        with claimed(target, "edit", [target.name], resume="never") as (work, _):
            path = work.files / target.name
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)  # an edit that finds the new file waits until the work folder is gone
                size = _fill(header, raw, fd, in_place=in_place)
                read_header(Source(path))  # what we wrote is what we meant to write
                refuse_changed(opened)
                replaces = os.path.lexists(target) and (in_place or overwrite)
                old = {target.name: () if in_place else replaceable(target)} if replaces else {}
                work.publish([(f"{FILES}/{target.name}", target)], old)
            except BaseException:
                if not work.settle():
                    work.discard()
                raise
            finally:
                os.close(fd)
    except OSError as e:
        raise PlanError(f"cannot be written: {e.strerror}", file=target) from e
    return size


def _fill(header: Header, raw: bytes, fd: int, *, in_place: bool) -> int:
    """Write the whole new file and sync it. Gives its size."""
    source = header.source
    _write_all(fd, raw)
    start = header.data if header.tensors else source.size
    _copy(source, start, fd)
    size = os.lseek(fd, 0, os.SEEK_CUR)
    size += _write_all(fd, bytes(-(size - len(raw)) % header.alignment)) if header.tensors else 0
    os.fchmod(fd, os.fstat(source.fileno()).st_mode & 0o7777 if in_place else 0o666 & ~_umask())
    os.fsync(fd)
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
