"""Which architecture a file is of: by the name in GGUF, or by what config.json says.

Our own records come first, so that installing a package changes nothing about models that polyquant knew before.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from polyquant import registry
from polyquant.architectures.record import Architecture
from polyquant.errors import printable
from polyquant.types import Checkpoint

__all__ = ["by_name", "known", "of_config", "of_metadata", "other_name"]


def _installed() -> tuple[Architecture, ...]:
    """Records of installed packages; a PluginWarning for what is none."""
    found = registry.installed_architectures()
    for other in (f for f in found if not isinstance(f, Architecture)):
        why = f"{other!r} is no architectures.record.Architecture"
        warnings.warn(f"an installed architecture is left out: {printable(why)}", registry.PluginWarning, stacklevel=3)
    return tuple(f for f in found if isinstance(f, Architecture))


def known() -> dict[str, Architecture]:
    """general.architecture -> the record that a GGUF file of that name is read with."""
    return _by_name((*registry.architectures(), *_installed()))


def by_name(name: object) -> Architecture | None:
    """The architecture of a GGUF file, None if it is not ours and no installed package's."""
    if not isinstance(name, str):
        return None
    return _by_name(registry.architectures()).get(name) or _by_name(_installed()).get(name)


def of_metadata(metadata: Mapping[str, Any]) -> Architecture | None:
    """The architecture of a GGUF file's metadata. Of records that share its name the first that `gguf_told_by` fits, which the plain one stands behind."""
    name = metadata.get("general.architecture")
    records = (*registry.architectures(), *_installed())
    special = (r for r in records if r.name == name and r.gguf_told_by)
    found = next((r for r in special if all(_says(metadata, f"{name}.{key}") for key in r.gguf_told_by)), None)
    return found or by_name(name)


def _says(metadata: Mapping[str, Any], told: str) -> bool:
    """True if a key is there and not zero, or has the value that stands behind "="."""
    key, _, value = told.partition("=")
    return str(metadata.get(key)) == value if value else _said(metadata.get(key))


def of_config(config: Mapping[str, Any]) -> Architecture | None:
    """The architecture of a config.json, None if it is not ours and no installed package's. Its class decides before its model type."""
    return _of_config(registry.architectures(), config) or _of_config(_installed(), config)


def other_name(checkpoint: Checkpoint, name: str) -> str | None:
    """What the checkpoint calls a tensor that is asked for by its Hugging Face or GGUF name; None where that is not known."""
    if checkpoint.naming == "gguf":
        family = of_metadata(checkpoint.metadata)
        return None if family is None else family.names.to_gguf(name)
    family = of_config(checkpoint.config)
    return None if family is None else family.names.to_hf(name)


def _by_name(records: Sequence[Architecture]) -> dict[str, Architecture]:
    """Of records with one name the first."""
    out: dict[str, Architecture] = {}
    for record in sorted(records, key=lambda r: bool(r.gguf_told_by)):
        out.setdefault(record.name, record)
    return out


def _of_config(records: Sequence[Architecture], config: Mapping[str, Any]) -> Architecture | None:
    classes = config.get("architectures")
    for name in classes if isinstance(classes, list) else ():
        if found := next((r for r in records if name in r.claims), None):
            return found
    kind = config.get("model_type")
    return next((r for r in records if kind in r.reads and all(_said(config.get(key)) for key in r.told_by)), None)


def _said(value: object) -> bool:
    """True for an entry that is there and not zero: a model with 0 experts has none."""
    return value is not None and not (isinstance(value, int | float) and value == 0)
