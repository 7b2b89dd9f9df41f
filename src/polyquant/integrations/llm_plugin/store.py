"""The added models: polyquant.json in llm's folder, name -> path and abilities."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import llm

from polyquant.architectures.pooling import pooling_of
from polyquant.errors import InputError, UnsupportedError
from polyquant.opening import detect, open_sound
from polyquant.runtime import identity
from polyquant.storage import strict_json
from polyquant.storage.locations import is_remote

__all__ = ["Entry", "add", "added", "remove"]

_NAME = re.compile(r"[A-Za-z0-9][\w.:-]{0,99}")


@dataclass(frozen=True, slots=True)
class Entry:
    """A model: its path, and whether it generates text and gives embeddings."""

    path: str
    generates: bool
    embeds: bool


def _file() -> Path:
    return Path(llm.user_dir()) / "polyquant.json"


def added() -> dict[str, Entry]:
    """Return the added models. Raises InputError for an invalid file."""
    file = _file()
    if not file.exists():
        return {}
    content = strict_json.typed(strict_json.read(file), dict, "the list of models", file=file)
    return {str(name): _entry(value, file) for name, value in content.items()}


def _entry(value: Any, file: Path) -> Entry:
    entry = strict_json.typed(value, dict, "a model", file=file)
    return Entry(
        strict_json.typed(entry.get("path"), str, "path", file=file),
        strict_json.typed(entry.get("generates"), bool, "generates", file=file),
        strict_json.typed(entry.get("embeds"), bool, "embeds", file=file),
    )


def add(name: str, path: str) -> Entry:
    """Add a model, or replace the one of that name. Reads headers only.

    Raises InputError for an invalid name or file, UnsupportedError for a model that does not run.
    """
    if not _NAME.fullmatch(name):
        raise InputError("not a name for a model", expected="letters, digits, and . _ : - inside", found=name)
    checkpoint = open_sound(detect(path)[0], path, {})
    architecture = identity.architecture(checkpoint)
    if not architecture.runs:
        raise UnsupportedError(
            f"architecture '{architecture.name}' can be converted but not run",
            file=path,
            hint="see `polyquant architectures`",
        )
    embeds = architecture.encoder or pooling_of(checkpoint, architecture.name) is not None
    stored = path if is_remote(path) else os.fspath(Path(path).resolve())
    entry = Entry(stored, generates=not architecture.encoder, embeds=embeds)
    _write({**added(), name: entry})
    return entry


def remove(name: str) -> None:
    """Remove a model from the list; its file stays. Raises InputError for an unknown name."""
    models = added()
    if name not in models:
        raise InputError("no model of that name was added", expected=", ".join(models) or "a name", found=name)
    del models[name]
    _write(models)


def _write(models: Mapping[str, Entry]) -> None:
    file = _file()
    file.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({name: asdict(entry) for name, entry in models.items()}, indent=2, ensure_ascii=False) + "\n"
    temporary = file.with_name(f"{file.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(file)
