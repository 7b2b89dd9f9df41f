"""Find the architecture of a file: by its name in GGUF, or by its config.json.

Built-in records come first, so installing a package does not change models that polyquant already supports.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from polyquant import registry
from polyquant.architectures.index import CLASSES, NAMES, TYPES
from polyquant.architectures.record import Architecture
from polyquant.errors import InputError, printable
from polyquant.storage.locations import is_remote
from polyquant.types import Checkpoint

__all__ = ["by_name", "known", "of_config", "of_metadata", "other_name", "refuse_single_file"]


def _installed() -> tuple[Architecture, ...]:
    """Return the records of installed packages; warns with PluginWarning about invalid ones."""
    records = registry.installed_architectures()
    for other in (r for r in records if not isinstance(r, Architecture)):
        why = f"{other!r} is not an architectures.record.Architecture"
        warnings.warn(f"an installed architecture is ignored: {printable(why)}", registry.PluginWarning, stacklevel=3)
    return tuple(r for r in records if isinstance(r, Architecture))


def _named(*words: tuple[Mapping[str, tuple[str, ...]], object]) -> tuple[Architecture, ...]:
    """Return the built-in records of some names (table of architectures/index.py, name); all for unknown names."""
    found = [table[word] for table, word in words if isinstance(word, str) and word in table]
    return (
        registry.architectures(frozenset(key for keys in found for key in keys)) if found else registry.architectures()
    )


def known() -> dict[str, Architecture]:
    """Return general.architecture -> the record used to read a GGUF file of that name."""
    return _by_name((*registry.architectures(), *_installed()))


def by_name(name: object) -> Architecture | None:
    """Return the architecture of this GGUF name, None if unknown."""
    if not isinstance(name, str):
        return None
    return _by_name(_named((NAMES, name))).get(name) or _by_name(_installed()).get(name)


def of_metadata(metadata: Mapping[str, Any]) -> Architecture | None:
    """Return the architecture of a GGUF file's metadata.

    Of records that share its name, the first whose `gguf_requires` matches; otherwise the one without `gguf_requires`.
    """
    name = metadata.get("general.architecture")
    records = (*_named((NAMES, name)), *_installed())
    special = (r for r in records if r.name == name and r.gguf_requires)
    match = next((r for r in special if all(_matches(metadata, f"{name}.{key}") for key in r.gguf_requires)), None)
    return match or by_name(name)


def _matches(metadata: Mapping[str, Any], condition: str) -> bool:
    """True if a key is present and not zero, or equals the value after "="."""
    key, _, value = condition.partition("=")
    return str(metadata.get(key)) == value if value else _present(metadata.get(key))


def of_config(config: Mapping[str, Any]) -> Architecture | None:
    """Return the architecture of a config.json, None if unknown. Its class takes precedence over its model type."""
    classes = config.get("architectures")
    claimed = [(CLASSES, name) for name in classes] if isinstance(classes, list) else []
    ours = _named(*claimed, (TYPES, config.get("model_type")))
    return _of_config(ours, config) or _of_config(_installed(), config)


def other_name(checkpoint: Checkpoint, name: str) -> str | None:
    """Return the checkpoint's name of a tensor given by its Hugging Face or GGUF name; None if unknown."""
    if checkpoint.naming == "gguf":
        family = of_metadata(checkpoint.metadata)
        return None if family is None else family.names.to_gguf(name)
    family = of_config(checkpoint.config)
    return None if family is None else family.names.to_hf(name)


def _by_name(records: Sequence[Architecture]) -> dict[str, Architecture]:
    """Map each name to its first record."""
    out: dict[str, Architecture] = {}
    for record in sorted(records, key=lambda r: bool(r.gguf_requires)):
        out.setdefault(record.name, record)
    return out


def _of_config(records: Sequence[Architecture], config: Mapping[str, Any]) -> Architecture | None:
    classes = config.get("architectures")
    for name in classes if isinstance(classes, list) else ():
        if match := next((r for r in records if name in r.claims), None):
            return match
    kind = config.get("model_type")
    return next((r for r in records if kind in r.reads and all(_present(config.get(key)) for key in r.requires)), None)


def _present(value: object) -> bool:
    """True for an entry that is present and not zero: a model with 0 experts has none."""
    return value is not None and not (isinstance(value, int | float) and value == 0)


def refuse_single_file(checkpoint: Checkpoint) -> None:
    """Raise InputError for one weight file of a folder that has a config.json: only the folder tells the model."""
    path = checkpoint.path
    if checkpoint.config or is_remote(path) or not path.is_file() or not (path.parent / "config.json").is_file():
        return
    raise InputError(
        "is one file of a folder, whose config.json tells the model",
        file=path,
        hint=f"name the folder: {path.parent}",
    )
