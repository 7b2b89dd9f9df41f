"""Detect msModelSlim folders. Apart from open.py, since every path is tried, and few are msModelSlim."""

from __future__ import annotations

import os

from polyquant.formats.msmodelslim.folder import descriptions, weight_stems
from polyquant.storage import folder as folders
from polyquant.storage.locations import located
from polyquant.types import Evidence

__all__ = ["sniff"]


def sniff(path: str | os.PathLike[str]) -> Evidence | None:
    """Evidence that this is an msModelSlim folder, by its files; None if not."""
    path = located(path)
    if not path.is_dir():
        return None
    names = folders.entries(path)
    if files := descriptions(names):
        return Evidence("msmodelslim", f"folder with {files[0]}")
    stems = weight_stems(names)
    return Evidence("msmodelslim", f"folder with {stems[0]}.safetensors but no description") if stems else None
