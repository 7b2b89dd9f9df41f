"""Small text files: licenses and templates."""

from __future__ import annotations

from pathlib import Path

from polyquant.errors import InputError
from polyquant.storage.source import file_bytes
from polyquant.storage.stores.manifests import SMALL

__all__ = ["text_of"]


def text_of(path: Path) -> str:
    """Return the text of a UTF-8 file of at most 4 MiB. Raises InputError."""
    try:
        return file_bytes(path, SMALL).decode()
    except UnicodeDecodeError as problem:
        raise InputError(f"is not UTF-8 (byte {problem.start})", file=path) from None
