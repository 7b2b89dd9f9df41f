"""The rest of a model in a store, next to its weights: template, parameters, license, ..."""

from __future__ import annotations

import os
from pathlib import Path

from polyquant.storage.locations import is_reference
from polyquant.storage.source import opened_files
from polyquant.storage.stored_path import StoredPath
from polyquant.storage.stores import layouts, ollama

__all__ = ["description"]


def description(path: str | os.PathLike[str]) -> dict[str, str]:
    """Return what a store has of a model apart from its weights, in printable text; {} for any other path.

    Raises InputError.
    """
    if not is_reference(path):
        return {}
    text = str(path) if isinstance(path, StoredPath) else os.fspath(path)
    with opened_files():  # not files of the model
        if text.startswith("oci:"):
            return layouts.described(layouts.chosen(text))
        return ollama.described(ollama.stored_model(text if text.startswith("ollama:") else Path(text)))
