"""Open Trellis folders of all dialects; reads headers, JSON and one header byte per weight."""

from __future__ import annotations

import os
from collections.abc import Iterator

from polyquant.errors import UnknownNameError
from polyquant.formats.stored import plain_weight
from polyquant.formats.trellis.sniff import sniff
from polyquant.formats.trellis.survey import Survey, axes_of, survey
from polyquant.formats.trellis.weights import Axes, weight_of
from polyquant.storage.folder import SIDE_FILES, member
from polyquant.storage.locations import located
from polyquant.types import Checkpoint, Evidence, Weight

__all__ = ["open", "sniff"]


def open(
    path: str | os.PathLike[str], *, repair: bool = False, axes: str | None = None
) -> Checkpoint:  # fmt: skip
    """Open a folder of any dialect, or one of its shards.

    repair: weights as Metal Marlin's quantizer intended them, not as its decoder reads them (reads su). axes: "kn" or
    "nk" for all weights, if the files do not show it. Raises InputError with the first error; UnknownNameError for
    other axes.
    """
    path = located(path)
    if axes not in (None, "kn", "nk"):
        raise UnknownNameError("axes", str(axes), ("kn", "nk"))
    requested: Axes | None = "kn" if axes == "kn" else "nk" if axes == "nk" else None
    contents = survey(path)
    for breach in contents.breaches:
        raise breach.error()
    chosen, axes_notes = axes_of(contents, requested)
    weights: dict[str, Weight] = {n: plain_weight(n, stored) for n, stored in contents.plain.items()}
    for name, facts in contents.weights.items():
        weights[name] = weight_of(facts, chosen[name], contents.metadata, repair=repair)
    ordered = {name: weights[name] for name in _file_order(contents)}
    side = {}
    if path.is_dir():
        side = {name: file for name in SIDE_FILES if (file := member(path, name)) is not None}
    notes = (*_notes(contents), *axes_notes, *(("repaired to the quantizer's intention",) if repair else ()))
    stated = {name: {"mse": note.mse} for name, note in contents.metadata.notes.items() if note.mse is not None}
    metadata = {**contents.files.metadata, "tensor_metadata": stated, **(contents.metadata.content or {})}
    return Checkpoint(
        f"trellis-v{contents.files.version}",
        path,
        ordered,
        metadata,
        contents.config or {},
        side,
        _dialect(chosen),
        notes,
        describes_itself=True,
    )


def _file_order(contents: Survey) -> list[str]:
    """Names in order of file and offset; a quantized weight is at the position of its indices."""
    files = {folder / name: i for i, (folder, name) in enumerate((*contents.files.names, *contents.files.base))}
    first = {**contents.plain, **{n: f.components["indices"] for n, f in contents.weights.items()}}
    return sorted(first, key=lambda n: (files[first[n].source.path], first[n].entry.offset))


def _dialect(axes: dict[str, Axes]) -> Evidence | None:
    kinds = set(axes.values())
    if kinds == {"nk"}:
        return Evidence("metal-marlin", "tiles of [N, K]")
    return Evidence("document", "tiles of [K, N]") if kinds == {"kn"} else None


def _notes(contents: Survey) -> Iterator[str]:
    """Notes about deviations that the reader handled."""
    yield from contents.files.notes
    if contents.config is None:
        yield "config.json is missing" if contents.path.is_dir() else "single file; config.json was not read"
    if contents.strays:
        yield f"{len(contents.strays)} tensors are not in the file named by weight_map, e.g. {contents.strays[0][0]}"
    if contents.duplicates:
        yield f"{len(contents.duplicates)} tensors of base files are also in the shards, which are used"
    if contents.unindexed and contents.files.weight_map is not None:
        yield f"{len(contents.unindexed)} plain tensors are in separate files, not in weight_map"
    if not contents.metadata.notes:
        yield "no metadata: bits, shapes and axes are derived from the sizes"
