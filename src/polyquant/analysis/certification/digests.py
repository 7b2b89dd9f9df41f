"""SHA-256 of the files of a checkpoint."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from polyquant.types import Checkpoint

__all__ = ["FileDigest", "file_digests"]

_PIECE = 1 << 22


@dataclass(frozen=True, slots=True)
class FileDigest:
    """Size in bytes and SHA-256 of one file."""

    size: int
    sha256: str


def file_digests(checkpoint: Checkpoint) -> dict[str, FileDigest]:
    """Digests of all files of a checkpoint, by name relative to its folder."""
    root = (checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent).absolute()
    linked = {p.resolve(): p for p in root.iterdir() if p.is_symlink()}  # as in the cache of the hub
    paths = dict.fromkeys(
        linked.get(p.resolve(), p.absolute()) for p in (*checkpoint.opened, *checkpoint.files.values())
    )
    named = {_relative(path, root): path for path in paths if path.is_file()}
    return {name: _digest(named[name]) for name in sorted(named)}


def _relative(path: Path, root: Path) -> str:
    for folder in (root, root.resolve()):
        if path.is_relative_to(folder):
            return path.relative_to(folder).as_posix()
    return str(path)


def _digest(path: Path) -> FileDigest:
    total, state = 0, hashlib.sha256()
    with path.open("rb") as f:
        while piece := f.read(_PIECE):
            state.update(piece)
            total += len(piece)
    return FileDigest(total, state.hexdigest())
