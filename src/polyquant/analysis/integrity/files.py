r"""SHA-256 of the files of a checkpoint, and lists of them as `sha256sum` writes and reads them.

DIGEST  NAME            two spaces; " *" for binary mode; NAME relative to the folder of the list
\DIGEST  NAME           a NAME with \\, \n or \r for backslashes and line ends
SHA256 (NAME) = DIGEST  as written by BSD and openssl
DIGEST                  only in NAME.sha256: the digest of NAME
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from polyquant.errors import InputError, printable
from polyquant.storage.locations import is_folder, is_remote
from polyquant.storage.source import file_bytes
from polyquant.types import Checkpoint

__all__ = ["FileDigest", "file_digest", "file_digests", "model_files", "read_list", "root_of", "sha256_list"]

_PIECE = 1 << 22
_LIST_BYTES = 4 << 20
"""Largest list that is read: about 40,000 files."""
_LINE = re.compile(r"(\\?)([0-9a-fA-F]{64}) [ *](.+)")
_BSD = re.compile(r"SHA256 ?\((.+)\) ?= ?([0-9a-fA-F]{64})")


@dataclass(frozen=True, slots=True)
class FileDigest:
    """Size in bytes and SHA-256 of one file."""

    size: int
    sha256: str


def root_of(path: Path) -> Path:
    """The folder to which names of files are relative: the model's, or that of its file."""
    return path if is_folder(path) else path.parent


def model_files(checkpoint: Checkpoint) -> dict[str, Path]:
    """The files of a checkpoint, by name relative to its folder, sorted."""
    root = root_of(checkpoint.path).absolute()
    inside = () if is_remote(root) else root.iterdir()  # where there are no links
    linked = {p.resolve(): p for p in inside if p.is_symlink()}  # as in the cache of the hub
    paths = dict.fromkeys(
        linked.get(p.resolve(), p.absolute()) for p in (*checkpoint.opened, *checkpoint.files.values())
    )
    named = {_relative(path, root): path for path in paths if path.is_file()}
    return {name: named[name] for name in sorted(named)}


def _relative(path: Path, root: Path) -> str:
    for folder in (root, root.resolve()):
        if path.is_relative_to(folder):
            return path.relative_to(folder).as_posix()
    return str(path)


def file_digest(path: Path, tell: Callable[[int], None] | None = None) -> FileDigest:
    """The digest of one file. tell: called with the number of bytes of each piece. Raises OSError."""
    total, state, buffer = 0, hashlib.sha256(), bytearray(_PIECE)
    with path.open("rb", buffering=0) as f:
        while n := f.readinto(buffer):
            state.update(memoryview(buffer)[:n])
            total += n
            if tell is not None:
                tell(n)
    return FileDigest(total, state.hexdigest())


def file_digests(checkpoint: Checkpoint) -> dict[str, FileDigest]:
    """Digests of all files of a checkpoint, by name relative to its folder."""
    return {name: file_digest(path) for name, path in model_files(checkpoint).items()}


# ---------------------------------------------------------------- lists


def sha256_list(digests: Mapping[str, FileDigest]) -> str:
    """A list that `sha256sum --check` reads, with one line per file."""
    lines = []
    for name, digest in digests.items():
        special = name.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
        lines.append(f"{chr(92) if special != name else ''}{digest.sha256}  {special}\n")
    return "".join(lines)


def read_list(path: Path) -> dict[str, str]:
    """Name -> digest of a list. Raises InputError for a line that is neither an entry, a comment nor empty."""
    data = file_bytes(path, _LIST_BYTES)
    out: dict[str, str] = {}
    for number, line in enumerate(data.decode("utf-8", "surrogateescape").splitlines(), 1):
        text = line.rstrip()
        if not text or text.startswith("#"):
            continue
        name, digest = _entry(text, path)
        if name is None:
            raise InputError(
                f"line {number} is not of a SHA-256 list", file=path, expected="DIGEST  NAME", found=printable(text, 60)
            )
        if out.setdefault(name, digest) != digest:
            raise InputError(f"line {number} contradicts an earlier one", file=path, found=printable(name, 60))
    return out


def _entry(text: str, path: Path) -> tuple[str | None, str]:
    if match := _LINE.fullmatch(text):
        name = match[3]
        if match[1]:
            name = re.sub(r"\\(.)", lambda m: {"n": "\n", "r": "\r"}.get(m[1], m[1]), name)
        return name.removeprefix("./"), match[2].lower()
    if match := _BSD.fullmatch(text):
        return match[1].removeprefix("./"), match[2].lower()
    if path.suffix == ".sha256" and re.fullmatch("[0-9a-fA-F]{64}", text):
        return path.stem, text.lower()
    return None, ""
