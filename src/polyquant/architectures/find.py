"""Which architecture a file is of: by the name in GGUF, or by what config.json says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyquant import registry
from polyquant.architectures.record import Architecture

__all__ = ["by_name", "known", "of_config"]


def known() -> dict[str, Architecture]:
    """general.architecture -> the record that a GGUF file of that name is read with."""
    out: dict[str, Architecture] = {}
    for record in registry.architectures():
        out.setdefault(record.name, record)
    return out


def by_name(name: object) -> Architecture | None:
    """The architecture of a GGUF file, None if it is not ours."""
    return known().get(name) if isinstance(name, str) else None


def of_config(config: Mapping[str, Any]) -> Architecture | None:
    """The architecture of a config.json, None if it is not ours. Its class decides before its model type."""
    classes = config.get("architectures")
    for name in classes if isinstance(classes, list) else ():
        if found := next((r for r in registry.architectures() if name in r.claims), None):
            return found
    kind = config.get("model_type")
    return next(
        (r for r in registry.architectures() if kind in r.reads and all(key in config for key in r.told_by)), None
    )
