"""The files of an msModelSlim model in a folder.

    quant_model_weights.safetensors            quant_model_description.json           the command line since v1
    quant_model_weight_w8a8.safetensors        quant_model_description_w8a8.json      the traditional tool
    quant_model_weight.safetensors             quant_model_description.json           the document

Weights are one file, or shards `STEM-00001-of-0000N.safetensors` with `STEM.safetensors.index.json`. Weights that were
renamed to model.safetensors are supported if the description exists. Other safetensors files are not part of the model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from polyquant.errors import InputError
from polyquant.storage.folder import SIDE_FILES, entries, read_index

__all__ = ["MsModelSlimFiles", "choose", "descriptions", "own_files", "weight_stems"]

_WEIGHTS = re.compile(r"(quant_model_weights?(?:_\w+)?)(-\d{5}-of-(\d{5}))?\.safetensors(\.index\.json)?")
_RENAMED = re.compile(r"(model)(-\d{5}-of-(\d{5}))?\.safetensors(\.index\.json)?")
_DESCRIPTION = re.compile(r"quant_model_description(_\w+)?\.json")


@dataclass(frozen=True, slots=True)
class MsModelSlimFiles:
    """The weight files and the description (None if missing). weight_map: tensor -> file, None without an index."""

    stem: str
    names: tuple[str, ...]
    description: str | None = None
    weight_map: Mapping[str, str] | None = None
    total_size: object = None
    index: str | None = None
    notes: tuple[str, ...] = ()


def weight_stems(names: Sequence[str]) -> list[str]:
    """Stems of the weight files, each one model: "quant_model_weights", "quant_model_weight_w8a8", ..."""
    return sorted({m[1] for n in names if (m := _WEIGHTS.fullmatch(n))})


def descriptions(names: Sequence[str]) -> list[str]:
    """Description files among the names of a folder."""
    return sorted(n for n in names if _DESCRIPTION.fullmatch(n))


def own_files(folder: Path, names: Iterable[str]) -> set[str]:
    """The files that are part of such a model, by name: weights, description and known small files."""
    patterns = (_WEIGHTS, _RENAMED, _DESCRIPTION)
    return {n for n in names if n in (*SIDE_FILES, "config.json") or any(p.fullmatch(n) for p in patterns)}


def choose(folder: Path, *, indexed: bool = True) -> MsModelSlimFiles:
    """The files of the model in `folder`; without `indexed` by their names alone.

    Raises InputError if there are none, several models, or a shard is missing.
    """
    names = entries(folder)
    stems = weight_stems(names)
    pattern = _WEIGHTS
    if not stems:
        stems, pattern = sorted({m[1] for n in names if (m := _RENAMED.fullmatch(n))}), _RENAMED
    if not stems:
        raise InputError(
            "a description without weights", file=folder, expected="quant_model_weight*.safetensors",
            hint="finish the download",
        )  # fmt: skip
    if len(stems) > 1:
        raise InputError(
            "several models in one folder", file=folder, found=", ".join(stems), hint="move each to a separate folder"
        )
    own = [n for n in names if (m := pattern.fullmatch(n)) and m[1] == stems[0]]
    return _files(folder, stems[0], own if indexed else [n for n in own if n.endswith(".safetensors")], names)


def _files(folder: Path, stem: str, own: list[str], names: list[str]) -> MsModelSlimFiles:
    description, notes = _described(folder, stem, descriptions(names))
    single, index = f"{stem}.safetensors", f"{stem}.safetensors.index.json"
    if stem == "model":
        notes = (*notes, f"the weights are named {single if single in own else index}")
    if single in own:
        ignored = tuple(n for n in own if n != single)
        more = (f"{single} is used; {len(ignored)} shard files are ignored",) if ignored else ()
        return MsModelSlimFiles(stem, (single,), description, notes=notes + more)
    if index in own:
        weight_map, metadata = read_index(folder, index)
        files = tuple(sorted(set(weight_map.values())))
        return MsModelSlimFiles(stem, files, description, weight_map, metadata.get("total_size"), index, notes)
    _refuse_gaps(folder, own)
    return MsModelSlimFiles(
        stem, tuple(own), description, notes=(*notes, f"{index} is missing; all shards were opened")
    )


def _described(folder: Path, stem: str, available: list[str]) -> tuple[str | None, tuple[str, ...]]:
    """The description of these weights: of the same type, else the one without a type, else the only one."""
    kind = stem.removeprefix("quant_model_weights").removeprefix("quant_model_weight") if stem != "model" else ""
    for name in (f"quant_model_description{kind}.json", "quant_model_description.json"):
        if name in available:
            ignored = tuple(n for n in available if n != name)
            return name, (f"{name} is used; {', '.join(ignored)} is ignored",) if ignored else ()
    if len(available) > 1:
        raise InputError(
            "several descriptions, but none for the weights' type",
            file=folder,
            expected=f"quant_model_description{kind}.json",
            found=", ".join(available),
            hint="remove the others",
        )
    return (available[0] if available else None), ()


def _refuse_gaps(folder: Path, shards: list[str]) -> None:
    """Raise InputError if the numbers of the shards have gaps."""
    numbers = [
        (int(m[2][1:6]), int(m[3])) for n in shards if (m := _WEIGHTS.fullmatch(n) or _RENAMED.fullmatch(n)) if m[2]
    ]
    total = numbers[0][1]
    if [i for i, _ in numbers] != list(range(1, total + 1)) or {t for _, t in numbers} != {total}:
        raise InputError("shards are missing", file=folder, expected=f"{total} shards", found=", ".join(shards[:4]))
