"""Which files of a folder are the model, in the order in which transformers looks for them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from polyquant.errors import InputError, UnsupportedError
from polyquant.storage.folder import entries, read_index

__all__ = ["PICKLE", "SAFETENSORS", "WeightFiles", "choose"]

SAFETENSORS, PICKLE = "model.safetensors", "pytorch_model.bin"
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")


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
            note = (f"{single} is used; {index} beside it is ignored",) if index in names else ()
            return WeightFiles((single,), notes=note)
        if index in names:
            weight_map, metadata = read_index(folder, index)
            files = tuple(dict.fromkeys(sorted(weight_map.values())))
            return WeightFiles(files, weight_map, metadata.get("total_size"), index)
    return _without_index(folder, [n for n in names if n.endswith(".safetensors")])


def _without_index(folder: Path, names: list[str]) -> WeightFiles:
    if not names:
        raise UnsupportedError(
            "no weights here", file=folder, expected="model.safetensors, pytorch_model.bin or an index of shards"
        )
    if len(names) == 1 and not _SHARD.fullmatch(names[0]):
        return WeightFiles((names[0],))
    found = [m for n in names if (m := _SHARD.fullmatch(n))]
    series = {(m[1], m[3]) for m in found}
    if len(series) != 1 or len(found) != len(names):
        raise UnsupportedError("several weight files and no index", file=folder, found=", ".join(names[:4]))
    total = int(found[0][3])
    if [int(m[2]) for m in found] != list(range(1, total + 1)):
        raise InputError("shards are missing", file=folder, expected=f"{total} shards", found=", ".join(names[:4]))
    return WeightFiles(tuple(names), notes=("there is no index; all shards were opened",))
