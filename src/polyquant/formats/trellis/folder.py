"""The files of a Trellis model in a folder.

v3   model.safetensors.index.json and its shards, or trellis_index.json and trellis_shard_NNNNN.safetensors
v2   layer_NNNN/*.safetensors, layer_NNNN/index.json
both base_weights.safetensors and router_weights.safetensors: plain tensors, often not in the index
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polyquant.errors import InputError, PolyquantError
from polyquant.storage.folder import SIDE_FILES, entries, read_index, subfolder

__all__ = ["BASE_FILES", "CONFIG", "INDEX", "LAYER", "V2_INDEX", "WRITER_INDEX", "TrellisFiles", "choose", "own_files"]

INDEX, CONFIG = "model.safetensors.index.json", "quantization_config.json"
V2_INDEX, WRITER_INDEX = "quantization_index.json", "trellis_index.json"
BASE_FILES = ("base_weights.safetensors", "router_weights.safetensors")
LAYER = re.compile(r"layer_(\d{1,6})")
_WRITTEN = re.compile(r"trellis_shard_(\d{5})\.safetensors")
_STANDARD = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
_LAYER_FILE = re.compile(r"layer_\d{1,6}/([^/]+\.safetensors|index\.json)")
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")


@dataclass(frozen=True, slots=True)
class TrellisFiles:
    """The weight files, as (folder, name), and the small files that describe them.

    weight_map: tensor -> file, None without an index; metadata: from the index; layers: folders of a v2 model; unused:
    safetensors files not in the index.
    """

    version: int
    names: tuple[tuple[Path, str], ...]
    base: tuple[tuple[Path, str], ...] = ()
    weight_map: Mapping[str, str] | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    layers: tuple[Path, ...] = ()
    unused: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def choose(folder: Path) -> TrellisFiles:
    """The files of the model in `folder`. Raises InputError."""
    names = entries(folder)
    present = [n for n in names if n.endswith(".safetensors")]
    base = [n for n in BASE_FILES if n in present]
    layers = sorted((n for n in names if LAYER.fullmatch(n)), key=lambda n: (int(n[6:]), n))
    notes = (f"{len(layers)} layer folders are ignored because of {INDEX}",) if layers and INDEX in names else ()
    if INDEX in names:
        weight_map, metadata = read_index(folder, INDEX)
        shards = sorted(set(weight_map.values()))
        base = [n for n in base if n not in shards]
        unused = tuple(n for n in present if n not in (*shards, *base))
        return TrellisFiles(3, _in(folder, shards), _in(folder, base), weight_map, metadata, (), unused, notes)
    written = [n for n in present if _WRITTEN.fullmatch(n)]
    if layers and not written:
        return _version_2(folder, layers, base, [n for n in present if n not in base])
    shards = written or [n for n in present if n not in base]
    if not shards:
        raise InputError(
            "no shards in this folder", file=folder, expected=f"{INDEX}, {WRITER_INDEX} or layer_0000", found="none"
        )
    _refuse_gaps(folder, shards)
    unused = tuple(n for n in present if n not in (*shards, *base))
    return TrellisFiles(3, _in(folder, shards), _in(folder, base), None, {}, (), unused, ("there is no index",))


def own_files(folder: Path, names: Iterable[str]) -> set[str]:
    """The files that are part of the model in `folder`: weights and known small files. Never a model card."""
    small = {*SIDE_FILES, *BASE_FILES, INDEX, CONFIG, V2_INDEX, WRITER_INDEX, "config.json"}
    own = {
        n for n in names if n in small or _WRITTEN.fullmatch(n) or _LAYER_FILE.fullmatch(n) or _STANDARD.fullmatch(n)
    }
    try:
        weights = choose(folder).names
    except PolyquantError:  # a broken model may be replaced too
        weights = ()
    return own | {name for home, name in weights if home == folder and name.endswith(".safetensors")}


def _version_2(folder: Path, layers: list[str], base: list[str], unused: list[str]) -> TrellisFiles:
    paths = tuple(subfolder(folder, name) for name in layers)
    # The index of a layer assigns tensors to files incorrectly, so every file is read.
    names = tuple((p, n) for p in paths for n in entries(p) if n.endswith(".safetensors"))
    if not names:
        raise InputError("the layer folders contain no safetensors files", file=folder, hint="finish the download")
    return TrellisFiles(2, names, _in(folder, base), layers=paths, unused=tuple(unused))


def _refuse_gaps(folder: Path, shards: list[str]) -> None:
    """Raise InputError if the numbers of the shards have gaps."""
    numbers = [(int(m[2]), int(m[3])) for n in shards if (m := _SHARD.fullmatch(n))]
    if numbers and [i for i, _ in numbers] != list(range(1, numbers[0][1] + 1)):
        raise InputError("shards are missing", file=folder, expected=f"{numbers[0][1]} shards", found=len(numbers))
    written = [int(m[1]) for n in shards if (m := _WRITTEN.fullmatch(n))]
    if written != list(range(len(written))):
        raise InputError("shards are missing", file=folder, expected="numbers from 0 on", found=shards[0])


def _in(folder: Path, names: Iterable[str]) -> tuple[tuple[Path, str], ...]:
    return tuple((folder, name) for name in names)
