"""Checksums of a checkpoint, as a value and as a JSON file.

    {"checksums": 1, "polyquant": VERSION, "format": NAME, "content": SHA256, "named": SHA256,
     "files": {NAME: {"size": BYTES, "sha256": SHA256}},
     "tensors": {NAME: {"content", "stored", "form", "codec", "shape", "file"}}}

content: the SHA-256 of the tensors' content digests, sorted, one per line: equal for any names, order and container.
named: of lines "DIGEST NAME", sorted, with each name as a JSON string in ASCII: also equal names. Both are recomputed
on reading, so a changed entry is found.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from polyquant.analysis.integrity.content import TensorDigest
from polyquant.analysis.integrity.files import FileDigest, sha256_list
from polyquant.errors import InputError, PlanError, printable
from polyquant.storage import strict_json
from polyquant.storage.claims import settle_all
from polyquant.storage.folder import CHECKSUMS
from polyquant.storage.locations import is_folder, located
from polyquant.storage.one_file import write_file
from polyquant.storage.source import Source
from polyquant.storage.stored_path import StoredPath
from polyquant.storage.stores.manifests import in_store
from polyquant.storage.targets import refuse_missing_folder
from polyquant.tables import Row, Table

__all__ = ["SUFFIX", "Checksums", "is_record", "record_of", "refuse_folder", "refuse_record"]

VERSION = 1
SUFFIX = ".checksums.json"
"""Appended to the name of a model of one file."""
_OURS = re.compile(rb'\s*\{\s*"checksums"\s*:')
_LIMIT = strict_json.Limit(40_000_000, 800_000)
"""About 80,000 tensors."""
_DIGEST = re.compile("[0-9a-f]{64}")


def record_of(path: str | os.PathLike[str]) -> Path:
    """The path that `polyquant checksum PATH` writes and `validate` reads."""
    where = located(path)
    return where / CHECKSUMS if is_folder(where) else where.parent / (where.name + SUFFIX)


@dataclass(frozen=True, slots=True, repr=False)
class Checksums:
    """Digests of a checkpoint's tensors, by name, and of its files, by name relative to `path`."""

    path: Path
    format: str
    tensors: Mapping[str, TensorDigest]
    files: Mapping[str, FileDigest]

    def __repr__(self) -> str:
        what = f"{len(self.tensors)} tensors, {len(self.files)} files, content {self.content[:16]}"
        return f"<Checksums {printable(self.path)} ({self.format}): {what}>"

    def _repr_html_(self) -> str:
        rows = ((name, list(t.shape), t.codec, t.form, t.content, t.file) for name, t in self.tensors.items())
        columns = ("tensor", "shape", "codec", "form", "content", "file")
        below = [f"{name}: {f.sha256}" for name, f in self.files.items()]
        return Table(repr(self).strip("<>"), columns, rows, len(self.tensors), below).html()

    def rows(self) -> list[Row]:
        """One row per tensor: tensor, shape, codec, form, content (SHA-256), file."""
        return [
            {
                "tensor": name,
                "shape": tuple(t.shape),
                "codec": t.codec,
                "form": t.form,
                "content": t.content,
                "file": t.file,
            }
            for name, t in self.tensors.items()
        ]

    @property
    def content(self) -> str:
        """SHA-256 of the contents of all tensors, independent of names, order and container."""
        return _lines_digest(t.content for t in self.tensors.values())

    @property
    def named(self) -> str:
        """SHA-256 of the contents with their names."""
        return _lines_digest(f"{t.content} {json.dumps(name)}" for name, t in self.tensors.items())

    def sha256(self) -> str:
        """The files as a list that `sha256sum --check` reads."""
        return sha256_list(self.files)

    def to_json(self) -> dict[str, Any]:
        """The checksums as JSON-compatible types."""
        from polyquant import __version__

        return {
            "checksums": VERSION,
            "polyquant": __version__,
            "format": self.format,
            "content": self.content,
            "named": self.named,
            "files": {name: asdict(f) for name, f in self.files.items()},
            "tensors": {name: {**asdict(t), "shape": list(t.shape)} for name, t in self.tensors.items()},
        }

    def write(self, path: str | os.PathLike[str] | None = None, *, overwrite: bool = False) -> Path:
        """Write them as JSON, by default where `validate` looks. Raises PlanError for an existing file, with
        `overwrite` only if it does not contain checksums.
        """
        target = record_of(self.path) if path is None else Path(path)
        refuse_record(target, overwrite=overwrite)
        write_file(target, json.dumps(self.to_json(), indent=1).encode("ascii") + b"\n", overwrite=overwrite)
        return target

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Checksums:
        """Read a file that `write` wrote. Raises InputError."""
        where = located(path)
        data = strict_json.typed(strict_json.read(where, _LIMIT), dict, "checksums", file=where)
        if data.get("checksums") != VERSION or isinstance(data["checksums"], bool):
            found = printable(data.get("checksums"), 40)
            raise InputError(
                "is not a file of checksums that this version reads", file=where, expected=VERSION, found=found
            )
        files = strict_json.typed(data.get("files"), dict, "files", file=where)
        tensors = strict_json.typed(data.get("tensors"), dict, "tensors", file=where)
        out = cls(
            where,
            strict_json.typed(data.get("format"), str, "format", file=where),
            {name: _tensor(entry, name, where) for name, entry in tensors.items()},
            {name: _file(entry, name, where) for name, entry in files.items()},
        )
        for key, digest in (("content", out.content), ("named", out.named)):
            if data.get(key) != digest:
                raise InputError(
                    f"contradicts itself: '{key}' is not the digest of its tensors",
                    file=where,
                    expected=digest,
                    found=printable(data.get(key), 70),
                    hint="the file of checksums was changed or damaged",
                )
        return out


def _lines_digest(lines: Iterable[str]) -> str:
    state = hashlib.sha256()
    for line in sorted(lines):
        state.update(line.encode("ascii") + b"\n")
    return state.hexdigest()


def _tensor(entry: Any, name: str, file: Path) -> TensorDigest:
    what = f"tensor '{printable(name, 80)}'"
    entry = strict_json.typed(entry, dict, what, file=file)
    form, codec, place = (
        strict_json.typed(entry.get(key), str, f"{key} of {what}", file=file) for key in ("form", "codec", "file")
    )
    shape = strict_json.integers(entry.get("shape"), f"shape of {what}", file=file)
    content, stored = (_hex(entry.get(key), f"{key} of {what}", file) for key in ("content", "stored"))
    return TensorDigest(content, stored, form, codec, shape, place)


def _file(entry: Any, name: str, file: Path) -> FileDigest:
    what = f"file '{printable(name, 80)}'"
    entry = strict_json.typed(entry, dict, what, file=file)
    return FileDigest(
        strict_json.integer(entry.get("size"), f"size of {what}", file=file),
        _hex(entry.get("sha256"), f"sha256 of {what}", file),
    )


def _hex(value: Any, what: str, file: Path) -> str:
    text: str = strict_json.typed(value, str, what, file=file)
    if not _DIGEST.fullmatch(text):
        raise InputError(
            f"{what} is not a SHA-256", file=file, expected="64 hexadecimal digits", found=printable(text, 70)
        )
    return text


# ---------------------------------------------------------------- files


def is_record(path: Path) -> bool:
    """True for a file of checksums that this program wrote. Raises InputError for an unreadable file."""
    source = Source(path)
    try:
        return bool(_OURS.match(source.pread(0, min(source.size, 256)).tobytes()))
    finally:
        source.close()


def refuse_record(target: Path, *, overwrite: bool) -> None:
    """Raise PlanError if checksums must not be written to `target`: another file, folder or link is there."""
    if not refuse_folder(target):
        return
    if not stat.S_ISREG(target.lstat().st_mode) or not is_record(target):
        raise PlanError("exists and is not a file of checksums", file=target, hint="choose another name with -o")
    if not overwrite:
        raise PlanError("target exists", file=target, hint="check it with `polyquant validate`, or pass --overwrite")


def refuse_folder(target: Path) -> bool:
    """Finish or undo a killed run; then True if `target` exists. Raises PlanError if its folder does not."""
    if isinstance(target, StoredPath) or in_store(target):
        raise PlanError(
            "a store of blobs takes no other files", file=target, hint="write the checksums elsewhere with -o FILE"
        )
    settle_all(target.absolute())
    refuse_missing_folder(target)
    return os.path.lexists(target)
