"""Find the model files of a folder, in the order in which transformers looks for them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from polyquant.errors import InputError, PolyquantError, UnsupportedError
from polyquant.storage.folder import SIDE_FILES, entries, pooling_files, read_index

__all__ = ["PICKLE", "SAFETENSORS", "WeightFiles", "choose", "own_files"]

SAFETENSORS, PICKLE = "model.safetensors", "pytorch_model.bin"
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")
_STANDARD = re.compile(r"(model|pytorch_model)(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?")
_CONFIGS = ("config.json", "quantize_config.json", "quant_config.json", "hf_quant_config.json")


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The weight files of a folder. weight_map: tensor -> file, None without an index."""

    names: tuple[str, ...]
    weight_map: Mapping[str, str] | None = None
    total_size: object = None
    index: str | None = None
    notes: tuple[str, ...] = ()


def choose(folder: Path) -> WeightFiles:
    """The weight files in the order in which transformers looks for them. Raises InputError or UnsupportedError."""
    names = entries(folder)
    for single in (SAFETENSORS, PICKLE):
        index = f"{single}.index.json"
        if single in names:
            note = (f"{single} is used; {index} is ignored",) if index in names else ()
            return WeightFiles((single,), notes=note)
        if index in names:
            weight_map, metadata = read_index(folder, index)
            files = tuple(dict.fromkeys(sorted(weight_map.values())))
            return WeightFiles(files, weight_map, metadata.get("total_size"), index)
    return _without_index(folder, [n for n in names if n.endswith(".safetensors")])


def own_files(folder: Path, names: Iterable[str]) -> set[str]:
    """The files that are part of the model in `folder`: weights and known small files. Never a model card."""
    own = {n for n in names if _STANDARD.fullmatch(n) or n in _CONFIGS or n in SIDE_FILES}
    with suppress(PolyquantError):  # a broken model may be replaced too
        own |= set(pooling_files(folder))
    try:
        weights = choose(folder).names
    except PolyquantError:  # a broken model may be replaced too
        weights = ()
    return own | {n for n in weights if n.endswith((".safetensors", ".bin"))}


def _without_index(folder: Path, names: list[str]) -> WeightFiles:
    if not names:
        raise UnsupportedError(
            "no weights in this folder",
            file=folder,
            expected="model.safetensors, pytorch_model.bin or an index of shards",
        )
    if len(names) == 1 and not _SHARD.fullmatch(names[0]):
        return WeightFiles((names[0],))
    matches = [m for n in names if (m := _SHARD.fullmatch(n))]
    series = {(m[1], m[3]) for m in matches}
    if len(series) != 1 or len(matches) != len(names):
        raise UnsupportedError("several weight files without an index", file=folder, found=", ".join(names[:4]))
    total = int(matches[0][3])
    if [int(m[2]) for m in matches] != list(range(1, total + 1)):
        raise InputError("shards are missing", file=folder, expected=f"{total} shards", found=", ".join(names[:4]))
    return WeightFiles(tuple(names), notes=("there is no index; all shards were opened",))
