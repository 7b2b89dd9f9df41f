"""Detect Trellis folders and shards. Apart from open.py, since every folder is tried, and few are Trellis."""

from __future__ import annotations

import os
from pathlib import Path

from polyquant.errors import InputError
from polyquant.formats.trellis.folder import BASE_FILES, CONFIG, INDEX, LAYER, V2_INDEX, WRITER_INDEX
from polyquant.storage import safetensors, strict_json
from polyquant.storage.folder import entries
from polyquant.storage.locations import located
from polyquant.storage.source import Source
from polyquant.types import Evidence

__all__ = ["sniff"]


def sniff(path: str | os.PathLike[str]) -> Evidence | None:
    """Evidence that this is a Trellis folder or one of its shards, by content; None if not."""
    path = located(path)
    if not path.is_dir():
        return _sniff_file(path) if path.is_file() and path.suffix == ".safetensors" else None
    names = set(entries(path))
    if WRITER_INDEX in names:
        return Evidence("trellis-v3", f"folder with {WRITER_INDEX}")
    if INDEX in names:
        return Evidence("trellis-v3", f"{INDEX} lists indices") if _mentions(path / INDEX) else None
    layers = [n for n in names if LAYER.fullmatch(n) and (path / n).is_dir()]
    if layers and any(n.endswith(".safetensors") for layer in layers for n in entries(path / layer)):
        return Evidence("trellis-v2", f"{len(layers)} layer folders with safetensors files")
    shards = sorted(n for n in names if n.endswith(".safetensors") and n not in BASE_FILES)
    if layers and (V2_INDEX in names or CONFIG in names):
        return Evidence("trellis-v2", f"{len(layers)} layer folders and their metadata")
    return _sniff_file(path / shards[0]) if shards else None


def _mentions(index: Path) -> bool:
    """True if the index contains indices. False for an unreadable index, which another format's reader reports."""
    try:
        source = Source(index)
        return source.size <= strict_json.INDEX.nbytes and _names(source, 0, source.size, ("indices",))
    except InputError:
        return False


def _sniff_file(path: Path) -> Evidence | None:
    """Detect a shard by the bytes of its header, without parsing a possibly malicious one twice."""
    try:
        source = Source(path)
        if not safetensors.plausible(source):
            return None
        length = int.from_bytes(source.pread(0, 8).tobytes(), "little")
        if not _names(source, 8, min(length, strict_json.HEADER.nbytes, source.size - 8), ("indices", "su")):
            return None
    except InputError:
        return None
    return Evidence("trellis-v3", "safetensors file with indices and su")


def _names(source: Source, offset: int, length: int, components: tuple[str, ...]) -> bool:
    """True if all these components are named in `length` bytes of JSON."""
    data = source.pread(offset, length).tobytes()
    return any(all(f'{dot}{c}"'.encode() in data for c in components) for dot in (".", "__"))
