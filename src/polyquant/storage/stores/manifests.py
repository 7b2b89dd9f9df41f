"""Manifests and descriptors, shared by both kinds of store. They are untrusted: sizes, digests and types are checked.

manifest     {"schemaVersion": 2, "mediaType": ..., "config": descriptor, "layers": [descriptor, ...]}
descriptor   {"mediaType": ..., "digest": "sha256:HEX", "size": BYTES, "annotations": {...}}
"""

from __future__ import annotations

import hashlib
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polyquant.errors import InputError, printable
from polyquant.storage import strict_json
from polyquant.storage.source import Source, file_bytes

__all__ = [
    "MANIFEST",
    "SMALL",
    "Descriptor",
    "Manifest",
    "blob_file",
    "descriptor",
    "file_digest",
    "in_store",
    "manifest",
    "small_blob",
]

MANIFEST = strict_json.Limit(4_000_000, 200_000)
"""Registries accept manifests of at most 4 MiB."""
SMALL = 4 << 20
"""Bytes of a template, parameters, a license: they are read whole."""
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}", re.ASCII)
_BLOB = re.compile(r"(?:sha256-)?[0-9a-f]{64}(?:\..*)?", re.ASCII | re.DOTALL)
_LONGEST = 1 << 62
_AT_ONCE = 8 << 20


@dataclass(frozen=True, slots=True)
class Descriptor:
    """One blob: media type, digest ("sha256:HEX"), size in bytes, annotations. source: the model that a layer of
    Ollama's store came from.
    """

    media_type: str
    digest: str
    size: int
    annotations: Mapping[str, str] = field(default_factory=dict)
    source: str = ""

    @property
    def hex(self) -> str:
        """The digest's hexadecimal digits."""
        return self.digest.partition(":")[2]


@dataclass(frozen=True, slots=True)
class Manifest:
    """A parsed manifest."""

    media_type: str
    config: Descriptor
    layers: tuple[Descriptor, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all layers and the config."""
        return self.config.size + sum(layer.size for layer in self.layers)


def manifest(value: Any, file: object) -> Manifest:
    """Check a parsed manifest. Raises InputError."""
    content = strict_json.typed(value, dict, "manifest", file=file)
    if content.get("schemaVersion") != 2 or isinstance(content.get("schemaVersion"), bool):
        raise InputError("is not a manifest", file=file, expected="schemaVersion 2", found=content.get("schemaVersion"))
    layers = strict_json.typed(content.get("layers"), list, "layers", file=file)
    return Manifest(
        _text(content.get("mediaType", ""), "mediaType", file),
        descriptor(content.get("config"), "config", file),
        tuple(descriptor(layer, f"layer {i}", file) for i, layer in enumerate(layers)),
    )


def descriptor(value: Any, what: str, file: object) -> Descriptor:
    """Check a parsed descriptor. Raises InputError: the digest becomes part of a path."""
    content = strict_json.typed(value, dict, what, file=file)
    digest = _text(content.get("digest"), f"digest of {what}", file)
    if _DIGEST.fullmatch(digest) is None:
        raise InputError(
            f"the digest of {what} is not valid", file=file, expected="sha256: and 64 hexadecimal digits",
            found=printable(digest, 80),
        )  # fmt: skip
    size = content.get("size")
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size < _LONGEST:
        raise InputError(f"the size of {what} is not valid", file=file, found=printable(size, 40))
    notes = strict_json.typed(content.get("annotations") or {}, dict, f"annotations of {what}", file=file)
    return Descriptor(
        _text(content.get("mediaType"), f"mediaType of {what}", file),
        digest,
        size,
        {key: _text(text, f"annotation '{printable(key, 40)}' of {what}", file) for key, text in notes.items()},
        _text(content.get("from", ""), f"origin of {what}", file),
    )


def _text(value: Any, what: str, file: object) -> str:
    text: str = strict_json.typed(value, str, what, file=file)
    return text


def blob_file(path: Path, blob: Descriptor) -> Path:
    """Return the path of a blob after checking that it is a regular file of the right size. Raises InputError."""
    try:
        status = path.lstat()
    except OSError as problem:
        raise InputError(
            f"a blob of the model cannot be opened: {problem.strerror}", file=path, expected=f"{blob.size} bytes",
            hint="the download is incomplete: pull or pack the model again",
        ) from problem  # fmt: skip
    if not stat.S_ISREG(status.st_mode):
        kind = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "a folder, pipe or device"
        raise InputError("a blob must be a regular file", file=path, found=kind)
    if status.st_size != blob.size:
        raise InputError(
            "a blob has another size than in its manifest", file=path, expected=f"{blob.size} bytes",
            found=status.st_size, hint="the store is damaged: pull or pack the model again",
        )  # fmt: skip
    return path


def small_blob(path: Path, blob: Descriptor) -> bytes:
    """Return the content of a small blob after checking its digest. Raises InputError."""
    data = file_bytes(blob_file(path, blob), SMALL)
    if hashlib.sha256(data).hexdigest() != blob.hex:
        raise InputError("a blob does not have the digest of its name", file=path, hint="the store is damaged")
    return data


def file_digest(source: Source) -> str:
    """Return the SHA-256 of a file in hexadecimal. Raises InputError."""
    state = hashlib.sha256()
    for at in range(0, source.size, _AT_ONCE):
        state.update(source.pread(at, min(_AT_ONCE, source.size - at)).data)
    return state.hexdigest()


def in_store(path: Path) -> bool:
    """Return True for a path in a folder of blobs: its content must not change, and it takes no other files."""
    folders = path.parent.parts[-2:]
    return _BLOB.fullmatch(path.name) is not None and (folders[-1:] == ("blobs",) or folders == ("blobs", "sha256"))
