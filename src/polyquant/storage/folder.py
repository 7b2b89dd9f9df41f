"""Untrusted model folders: which of their files may be opened, and the JSON files that all of them share.

A file is a plain name inside the folder. A link is followed if its target is inside the folder, or in `blobs` of the
hub cache repository that the folder is a snapshot of:

    models--org--name/blobs/0f3a...                                       the file
    models--org--name/snapshots/REVISION/model.safetensors -> ../../blobs/0f3a...

Anything else that leaves the folder is refused: a downloaded folder must not reach other files of the machine.
"""

from __future__ import annotations

import re
import stat
from pathlib import Path
from typing import Any

from polyquant.errors import InputError
from polyquant.storage import strict_json

__all__ = [
    "CHECKSUMS",
    "MODULES",
    "SIDE_FILES",
    "LeavesFolderError",
    "base_name",
    "entries",
    "inner_name",
    "member",
    "pooling_files",
    "pooling_folder",
    "read_config",
    "read_index",
    "subfolder",
]

SIDE_FILES = (
    "tokenizer.json", "tokenizer_config.json", "generation_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model",
    "tekken.json",
    "chat_template.jinja", "chat_template.json", "preprocessor_config.json", "processor_config.json",
    "sentence_bert_config.json", "config_sentence_transformers.json",
)  # fmt: skip
CHECKSUMS = "polyquant-checksums.json"
"""The checksums of a folder (`polyquant checksum`)."""
MODULES = "modules.json"
"""In an embedding model: the modules of sentence-transformers, each with the folder of its settings."""


_PLAIN_NAME = re.compile(r"[^/\\:\0-\x1f]{1,255}")


class LeavesFolderError(InputError):
    """A name or a link that points outside the folder."""


def base_name(name: object) -> bool:
    """Return True for a plain file name, which cannot leave the folder."""
    return isinstance(name, str) and name not in (".", "..") and _PLAIN_NAME.fullmatch(name) is not None


def inner_name(name: object) -> bool:
    """Return True for a plain file name, or one inside a subfolder with a plain name."""
    return isinstance(name, str) and 0 < len(parts := name.split("/")) <= 2 and all(map(base_name, parts))


def entries(folder: Path) -> list[str]:
    """Return the sorted names in the folder. Raises InputError."""
    try:
        return sorted(p.name for p in folder.iterdir())
    except OSError as e:
        raise InputError(f"cannot be listed: {e.strerror}", file=folder) from e


def member(folder: Path, name: str) -> Path | None:
    """Return the path of a regular file, following links; None if it does not exist.

    Raises InputError if it leaves the folder.
    """
    if not base_name(name):
        raise LeavesFolderError("name leaves the folder", file=folder, expected="a plain file name", found=name)
    path = folder / name
    try:
        mode = path.lstat().st_mode
    except PermissionError as e:
        raise InputError(f"cannot be read: {e.strerror}", file=path) from e
    except (OSError, ValueError):  # ValueError: a surrogate in the name
        return None
    if stat.S_ISREG(mode):
        return path
    try:
        target = path.resolve(strict=True)
    except (OSError, RuntimeError) as e:
        raise InputError("is a broken link", file=path, hint="finish the download, or copy the file here") from e
    if stat.S_ISLNK(mode) and not _allowed(folder.resolve(), target):
        raise LeavesFolderError("is a link that leaves the folder", file=path, found=target, hint="copy the file here")
    if not stat.S_ISREG(target.stat().st_mode):
        raise InputError("is not a regular file", file=path)
    return path


def subfolder(folder: Path, name: str) -> Path:
    """Return the path of a subfolder, following links. Raises InputError if it leaves `folder` or is not a folder."""
    if not base_name(name):
        raise LeavesFolderError("name leaves the folder", file=folder, expected="a plain folder name", found=name)
    path = folder / name
    try:
        target = path.resolve(strict=True)
    except (OSError, RuntimeError) as e:
        raise InputError("is a broken link", file=path, hint="finish the download, or copy the folder here") from e
    if path.is_symlink() and not _allowed(folder.resolve(), target):
        raise LeavesFolderError(
            "is a link that leaves the folder", file=path, found=target, hint="copy the folder here"
        )
    if not target.is_dir():
        raise InputError("is not a folder", file=path)
    return path


def pooling_folder(modules: Path) -> str | None:
    """Return the folder with the pooling settings, from modules.json; None if no module pools. Raises InputError."""
    for step in strict_json.typed(strict_json.read(modules), list, MODULES, file=modules):
        module = step if isinstance(step, dict) else {}
        if str(module.get("type")).endswith("Pooling"):
            name: str = strict_json.typed(module.get("path"), str, "the pooling folder", file=modules)
            return name
    return None


def pooling_files(folder: Path) -> dict[str, Path]:
    """Return modules.json and the pooling settings by relative name; {} for a non-embedding model.

    Raises InputError.
    """
    modules = member(folder, MODULES)
    name = pooling_folder(modules) if modules is not None else None
    if modules is None or not name:
        return {} if modules is None else {MODULES: modules}
    settings = member(subfolder(folder, name), "config.json")
    return {MODULES: modules} | ({f"{name}/config.json": settings} if settings is not None else {})


def _allowed(folder: Path, target: Path) -> bool:
    if target.is_relative_to(folder):
        return True
    for parent in folder.parents:
        if parent.name == "snapshots":
            return target.is_relative_to(parent.parent / "blobs")
    return False


def read_config(folder: Path) -> dict[str, Any] | None:
    """Return the content of config.json, or None if there is none. Raises InputError."""
    path = member(folder, "config.json")
    if path is None:
        return None
    return strict_json.typed(strict_json.read(path), dict, "config.json", file=path)


def read_index(folder: Path, name: str) -> tuple[dict[str, str], dict[str, Any]]:
    """Return (weight_map, metadata) of an index. Raises InputError, also if an entry is not a plain file name."""
    path = member(folder, name)
    if path is None:
        raise InputError("is missing", file=folder / name)
    content = strict_json.typed(strict_json.read(path, strict_json.INDEX, once=True), dict, "index", file=path)
    weight_map = strict_json.typed(content.get("weight_map"), dict, "weight_map", file=path)
    known: set[str] = set()
    for tensor, file in weight_map.items():
        if isinstance(file, str) and file in known:
            continue
        if not base_name(file):
            raise LeavesFolderError(
                "weight_map names a file outside the folder",
                file=path,
                tensor=tensor,
                expected="a base name",
                found=file,
            )
        known.add(file)
    metadata = content.get("metadata")
    return weight_map, metadata if isinstance(metadata, dict) else {}
