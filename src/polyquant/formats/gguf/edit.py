"""Edit metadata and tensor names without touching tensor data.

Unchanged values are copied byte for byte. Files of version 1 or 2 become version 3; the byte order is kept. An in-place
change within one memory page that moves nothing is one positioned write. Anything else is written to a file in a work
folder next to the target, to which the kernel copies the tensor data, and then renamed: a kill at any moment leaves the
old file or the new one, and the next edit cleans up. Concurrent in-place edits of one file wait for each other.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
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
from polyquant.storage.claims import claimed, settle_all
from polyquant.storage.locations import is_remote, located
from polyquant.storage.source import FileState, Source, opened_files, refuse_changed
from polyquant.storage.stores.manifests import in_store
from polyquant.storage.work_folder import FILES
from polyquant.types import Kind, Meta

__all__ = ["Edited", "edit"]

_PAGE = 4096
_TYPED_HINT = "write key:type=value, e.g. general.name:str=Llama"


@dataclass(frozen=True, slots=True)
class Edited:
    """The result of an edit: file, size, and method: "unchanged", "in place" (one write), "rewritten" or "copied"."""

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
    """Change metadata of one GGUF file, in place or to a copy (dst). First remove, then rename, then set.

    set: key -> Meta, or a string or Python value for a key with a known type. A key keeps its type unless it is also in
    `remove`. Raises UnknownNameError for missing keys or tensors, PlanError for values that cannot be written and
    changes that would move tensor data (general.alignment), InputError for broken files.
    """
    if is_remote(src):
        raise PlanError("a URL cannot be edited", file=located(src), hint="download the file, then edit the copy")
    path = located(src).resolve() if dst is None else located(src)
    if dst is None and in_store(Path(os.fspath(path))):
        raise PlanError(
            "is a blob in a store, named by its digest, and cannot be edited in place", file=path,
            hint="write a copy with --output, then `polyquant pack` it",
        )  # fmt: skip
    if dst is not None:
        refuse_target(Path(dst), path, overwrite=overwrite)
    with _alone(path) if dst is None else nullcontext():
        if dst is None:
            settle_all(path.absolute())
        with opened_files() as opened:
            source = Source(path)
        header = _checked_header(source)
        entries = _entries(header, set or {}, tuple(remove), rename or {})
        tensors = _tensors(header, rename_tensor or {})
        raw = encode_header(tensors, entries, header.alignment, header.order)
        if dst is None and (how := _write_in_place(header, raw)):
            return Edited(Path(src), source.size, how)
        target = path if dst is None else Path(dst)
        size = _rewrite(header, raw, target, opened, in_place=dst is None, overwrite=overwrite)
        return Edited(Path(src if dst is None else dst), size, "rewritten" if dst is None else "copied")


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Wait until no other edit is working on the file. Raises InputError if it cannot be opened."""
    while True:
        Source(path).close()  # raises our own error
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
            os.close(fd)  # if another edit has replaced the file meanwhile, lock the new one


def _checked_header(source: Source) -> Header:
    """The header of a file without errors. Raises InputError otherwise; overlong tensor names are allowed, since they
    can be renamed.
    """
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
            raise PlanError(f"two keys would be named '{printable(new)}'", file=header.source.path)
    touched = {*remove, *rename, *rename.values(), *changes}
    if "general.alignment" in touched and header.tensors:
        raise PlanError(
            "general.alignment determines tensor offsets and cannot be edited",
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
    """The value to write for a key of type (kind, item), None if it is new."""
    if isinstance(value, Meta):
        if kind is not None and (value.kind, value.item) != (kind, item):
            raise PlanError(
                f"'{printable(key)}' has a different type",
                expected=_shown(kind, item),
                found=_shown(value.kind, value.item),
                hint="omit the type, or remove the key in the same edit to change its type",
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
    """An entry with an unchanged value. Version 1 has different lengths, so its values are decoded and encoded."""
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
    """Write the bytes that differ, if nothing moves and they are in one page; else return None."""
    source = header.source
    if os.fstat(source.fileno()).st_nlink > 1:  # also a blob of a store, which must not change
        return None
    if len(raw) != header.data or (not header.tensors and len(raw) != source.size):
        return None
    old = np.frombuffer(source.pread(0, len(raw)).tobytes(), np.uint8)
    differ = np.flatnonzero(old != np.frombuffer(raw, np.uint8))
    if not len(differ):
        with _writing(source.path):
            os.fsync(source.fileno())  # an edit before a kill may have written it
        return "unchanged"
    start, stop = int(differ[0]), int(differ[-1]) + 1
    if start // _PAGE != (stop - 1) // _PAGE:
        return None
    with _writing(source.path):
        fd = os.open(source.path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            _overwrite(fd, raw[start:stop], start)
        except OSError:
            with suppress(OSError):  # a full or failing disk: some of the bytes may be new
                _overwrite(fd, old[start:stop].tobytes(), start)
            raise
        finally:
            os.close(fd)
    return "in place"


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turn an OSError into a PlanError that names the file."""
    try:
        yield
    except OSError as e:
        raise PlanError(f"cannot be written: {e.strerror}", file=path) from e


def _overwrite(fd: int, raw: bytes, at: int) -> None:
    """Write and sync bytes at an offset."""
    view = memoryview(raw)
    while view:
        n = os.pwrite(fd, view, at)
        view, at = view[n:], at + n
    os.fsync(fd)


def _rewrite(
    header: Header, raw: bytes, target: Path, opened: Mapping[Path, FileState], *, in_place: bool, overwrite: bool
) -> int:
    """Write header and data to a file in a work folder, sync and rename it. Returns the size."""
    target = target.absolute()
    with (
        _writing(target),
        claimed(target, "edit", [target.name], resume="never") as (work, _),
        ExitStack() as files,
    ):
        path = work.files / target.name
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            files.callback(os.close, fd)
            fcntl.flock(fd, fcntl.LOCK_EX)  # an edit of the new file waits until the work folder is removed
            size = _fill(header, raw, fd, in_place=in_place)
            read_header(Source(path))  # verify the written header
            refuse_changed(opened)
            replaces = os.path.lexists(target) and (in_place or overwrite)
            old = {target.name: () if in_place else replaceable(target)} if replaces else {}
            work.publish([(f"{FILES}/{target.name}", target)], old)
        except BaseException as error:
            work.abandon(error, resumable=False)
            raise
    return size


def _fill(header: Header, raw: bytes, fd: int, *, in_place: bool) -> int:
    """Write and sync the new file. Returns its size."""
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
    """Write all bytes; returns their number."""
    view = memoryview(raw)
    while view:
        view = view[os.write(fd, view) :]
    return len(raw)


def _copy(source: Source, at: int, fd: int) -> None:
    """Copy everything from `at` on, inside the kernel if possible.

    Raises InputError if the source shrinks meanwhile.
    """
    inside = getattr(os, "copy_file_range", None)
    while at < source.size:
        n = 0
        if inside is not None:
            try:
                n = inside(source.fileno(), fd, min(1 << 30, source.size - at), at)
            except OSError:  # across file systems, or not supported
                inside = None
        if inside is None:
            n = _write_all(fd, os.pread(source.fileno(), min(1 << 24, source.size - at), at))
        if n == 0:
            raise InputError("shrank while being copied", file=source.path, found=f"end at byte {at}")
        at += n


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
