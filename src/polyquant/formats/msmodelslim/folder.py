"""Which files of a folder are an msModelSlim model.

    quant_model_weights.safetensors            quant_model_description.json           the command line since v1
    quant_model_weight_w8a8.safetensors        quant_model_description_w8a8.json      the traditional tool; the type stands in both names
    quant_model_weight.safetensors             quant_model_description.json           the document

Weights are one file, or shards `STEM-00001-of-0000N.safetensors` with `STEM.safetensors.index.json`. People also rename the weights to
model.safetensors and keep the description: such a folder is read too. Other safetensors files of a folder are none of the model's.
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
    """The weight files and the description (None: there is none). weight_map: tensor -> file, None without an index."""

    stem: str
    names: tuple[str, ...]
    description: str | None = None
    weight_map: Mapping[str, str] | None = None
    total_size: object = None
    index: str | None = None
    notes: tuple[str, ...] = ()


def weight_stems(names: Sequence[str]) -> list[str]:
    """First parts of the names of weight files, each one model: "quant_model_weights", "quant_model_weight_w8a8", ..."""
    return sorted({m[1] for n in names if (m := _WEIGHTS.fullmatch(n))})


def descriptions(names: Sequence[str]) -> list[str]:
    """Description files among the names of a folder."""
    return sorted(n for n in names if _DESCRIPTION.fullmatch(n))


def own_files(folder: Path, names: Iterable[str]) -> set[str]:
    """Which of these files are part of such a model, by their names: weights, description and the small files that readers know."""
    patterns = (_WEIGHTS, _RENAMED, _DESCRIPTION)
    return {n for n in names if n in (*SIDE_FILES, "config.json") or any(p.fullmatch(n) for p in patterns)}


def choose(folder: Path, *, indexed: bool = True) -> MsModelSlimFiles:
    """The files of the model in `folder`; without `indexed` by their names alone. Raises InputError if there are none, several models, or a shard
    is missing."""
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
            "several models in one folder", file=folder, found=", ".join(stems), hint="give each a folder of its own"
        )
    own = [n for n in names if (m := pattern.fullmatch(n)) and m[1] == stems[0]]
    return _files(folder, stems[0], own if indexed else [n for n in own if n.endswith(".safetensors")], names)


def _files(folder: Path, stem: str, own: list[str], names: list[str]) -> MsModelSlimFiles:
    description, notes = _described(folder, stem, descriptions(names))
    single, index = f"{stem}.safetensors", f"{stem}.safetensors.index.json"
    if stem == "model":
        notes = (*notes, f"the weights are called {single if single in own else index}")
    if single in own:
        beside = tuple(n for n in own if n != single)
        more = (f"{single} is used; {len(beside)} files of shards beside it are ignored",) if beside else ()
        return MsModelSlimFiles(stem, (single,), description, notes=notes + more)
    if index in own:
        weight_map, metadata = read_index(folder, index)
        files = tuple(sorted(set(weight_map.values())))
        return MsModelSlimFiles(stem, files, description, weight_map, metadata.get("total_size"), index, notes)
    _refuse_gaps(folder, own)
    return MsModelSlimFiles(
        stem, tuple(own), description, notes=(*notes, f"{index} is missing; all shards were opened")
    )


def _described(folder: Path, stem: str, found: list[str]) -> tuple[str | None, tuple[str, ...]]:
    """The description that belongs to these weights: that of the same type, else the one without a type, else the only one."""
    kind = stem.removeprefix("quant_model_weights").removeprefix("quant_model_weight") if stem != "model" else ""
    for name in (f"quant_model_description{kind}.json", "quant_model_description.json"):
        if name in found:
            beside = tuple(n for n in found if n != name)
            return name, (f"{name} is used; {', '.join(beside)} beside it is ignored",) if beside else ()
    if len(found) > 1:
        raise InputError(
            "several descriptions and none of the weights' type", file=folder, expected=f"quant_model_description{kind}.json",
            found=", ".join(found), hint="remove the others",
        )  # fmt: skip
    return (found[0] if found else None), ()


def _refuse_gaps(folder: Path, shards: list[str]) -> None:
    """Shards are numbered: a missing one shows in the numbers."""
    numbers = [
        (int(m[2][1:6]), int(m[3])) for n in shards if (m := _WEIGHTS.fullmatch(n) or _RENAMED.fullmatch(n)) if m[2]
    ]
    total = numbers[0][1]
    if [i for i, _ in numbers] != list(range(1, total + 1)) or {t for _, t in numbers} != {total}:
        raise InputError("shards are missing", file=folder, expected=f"{total} shards", found=", ".join(shards[:4]))
