"""Which format is this, and open it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from polyquant.capabilities import Tile, Tiled
from polyquant.errors import InputError, UnsupportedError
from polyquant.registry import FORMATS, format_module
from polyquant.storage.source import Source, opened_files
from polyquant.types import Checkpoint, Evidence

__all__ = ["detect", "look", "open_checkpoint", "with_tile"]


def detect(path: str | os.PathLike[str]) -> tuple[ModuleType, Evidence]:
    """The module of the format and why. Raises InputError for what is missing or unknown; never judges by extension alone."""
    where = Path(path)
    folder = os.path.isdir(where)  # noqa: PTH112 - False for a name that no file can have, which opening then says
    head = b"" if folder else _first_bytes(where)
    for name in FORMATS:
        module = format_module(name)
        if (evidence := module.sniff(where)) is not None:
            return module, evidence
    if head in (b"3IRT", b"TRI3"):
        raise UnsupportedError("a Trinity .tri file", file=where, hint="export it as GGUF with Trinity, then open that")
    if not folder:
        raise InputError(
            "not a format that polyquant knows",
            file=where,
            found=f"first bytes {head!r}" if head else "an empty file",
            hint="expected GGUF, safetensors or a Hugging Face folder",
        )
    raise InputError(
        "a folder without weights", file=where, hint="expected *.safetensors, pytorch_model.bin or an index of shards"
    )


def _first_bytes(path: Path) -> bytes:
    """At most 4 bytes. Raises InputError for what is missing, a pipe or a device."""
    source = Source(path)
    head = source.pread(0, min(4, source.size)).tobytes()
    source.close()
    return head


def open_checkpoint(
    path: str | os.PathLike[str],
    *,
    ternary_layout: str | None = None,
    dialect: str | None = None,
    tile: Tile | None = None,
    repair: bool = False,
    axes: str | None = None,
) -> Checkpoint:
    """`look`, for a checkpoint that is to be used. Raises UnsupportedError where weights are of a quantization scheme that is not decoded."""
    found = look(path, ternary_layout=ternary_layout, dialect=dialect, tile=tile, repair=repair, axes=axes)
    if found.undecoded is not None:
        raise found.undecoded.error()
    return found


def look(
    path: str | os.PathLike[str],
    *,
    ternary_layout: str | None = None,
    dialect: str | None = None,
    tile: Tile | None = None,
    repair: bool = False,
    axes: str | None = None,
) -> Checkpoint:
    """Open a GGUF file, a Trellis folder or a Hugging Face folder as a mapping from tensor name to Weight. Reads headers only.

    Weights of a quantization scheme that is not decoded open as they are stored; their `dequantize` raises UnsupportedError.
    ternary_layout ("i2_s.x86", "i2_s.arm", "i2_s.x4", "trinity.i2_s"), dialect and tile (BM, BK, bm of TL1 and TL2 tensors) say what the
    bytes of a GGUF file cannot tell; repair (what Metal Marlin's quantizer meant) and axes ("kn" or "nk") what those of a Trellis folder cannot. Raises InputError for broken input.
    """
    module, _ = detect(path)
    chosen = {"ternary_layout": ternary_layout, "dialect": dialect}
    options: dict[str, Any] = {k: v for k, v in chosen.items() if v is not None}
    if (options or tile) and module.__name__ != "polyquant.formats.gguf":
        raise UnsupportedError("layout, dialect and tile can be chosen for GGUF files only", file=path)
    asked: dict[str, Any] = ({"repair": True} if repair else {}) | ({} if axes is None else {"axes": axes})
    if asked and module.__name__ != "polyquant.formats.trellis":
        raise UnsupportedError("repair and axes can be chosen for Trellis folders only", file=path)
    with opened_files() as opened:
        found = replace(cast(Checkpoint, module.open(Path(path), **options, **asked)), opened=opened)
    return found if tile is None else with_tile(found, tile)


def with_tile(checkpoint: Checkpoint, tile: Tile) -> Checkpoint:
    """The same checkpoint with the tile configuration of its TL1 and TL2 tensors said."""
    weights = {
        w.name: replace(w, codec=w.codec.with_tile(tile)) if isinstance(w.codec, Tiled) else w
        for w in checkpoint.values()
    }
    return replace(checkpoint, weights=weights)
