"""Metadata of quantized tensors in the JSON files of the folder. Five schemas:

    quantization_config.json   {"global_config": {...}, "tensor_metadata": {NAME: {"bits", "shape": [K, N], ...}}}
                               polyquant adds "codebook" and "hadamard"
    quantization_config.json   {"tensors": [{"name", "bits", "shape"}, ...]}     Metal Marlin
    trellis_index.json         the same                                         its shard writer
    quantization_index.json    {"layers": [{"name", "bits", "shape"}, ...]}      its v2
    layer_NNNN/index.json      {"tensors": [...]}                                its v2

Without a codebook it is Metal Marlin's grid without rotation, regardless of hadamard_transform.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polyquant.errors import InputError
from polyquant.formats.trellis.folder import CONFIG, V2_INDEX, WRITER_INDEX
from polyquant.storage import strict_json
from polyquant.storage.folder import member

__all__ = ["GRID", "Codebook", "Metadata", "TensorNote", "read_metadata"]


@dataclass(frozen=True, slots=True)
class Codebook:
    """`codebook` of the metadata. window_bits: None for the grid, whose windows are the codes."""

    type: str
    window_bits: int | None
    tile_order: str


GRID = Codebook("grid", None, "row_major")


@dataclass(frozen=True, slots=True)
class TensorNote:
    """Metadata of one tensor. codebook: None if not given; blocks: None for the global flag."""

    file: Path
    bits: int | None = None
    shape: tuple[int, int] | None = None
    codebook: Codebook | None = None
    blocks: tuple[int, int] | None = None
    mse: float | None = None


@dataclass(frozen=True, slots=True)
class Metadata:
    """All metadata. seed: documented schema with axes [K, N]; content: the parsed quantization_config.json."""

    notes: Mapping[str, TensorNote] = field(default_factory=dict)
    codebook: Codebook | None = None
    rotated: bool = False
    seed: bool = False
    method: str = ""
    content: Mapping[str, Any] | None = None
    shards: int | None = None

    def codebook_of(self, name: str) -> Codebook | None:
        """The codebook of one tensor; None if the folder has none."""
        note = self.notes.get(name)
        return note.codebook if note is not None and note.codebook is not None else self.codebook


def read_metadata(folder: Path, layers: Iterable[Path] = ()) -> Metadata:
    """Read all metadata of the folder. Raises InputError for files that are not strict JSON, or have members of wrong
    types.
    """
    notes: dict[str, TensorNote] = {}
    for layer in layers:
        _listed(layer, "index.json", "tensors", notes)
    v2 = _listed(folder, V2_INDEX, "layers", notes)
    written = _listed(folder, WRITER_INDEX, "tensors", notes)
    path = member(folder, CONFIG)
    method = _method((v2 or {}).get("quantization"))
    shards = written.get("num_shards") if written else None
    count = shards if isinstance(shards, int) else None
    if path is None:
        return Metadata(notes, method=method, shards=count)
    content = strict_json.typed(strict_json.read(path, strict_json.INDEX), dict, CONFIG, file=path)
    if "tensors" in content and "tensor_metadata" not in content:
        _entries(path, content["tensors"], "tensors", notes)
        return Metadata(notes, method=_method(content) or method, content=content, shards=count)
    tensors = strict_json.typed(content.get("tensor_metadata", {}), dict, "tensor_metadata", file=path)
    for name, entry in tensors.items():
        notes[name] = _note(path, name, entry)
    shared = strict_json.typed(content.get("global_config", {}), dict, "global_config", file=path)
    rotated = strict_json.typed(shared.get("hadamard_transform", False), bool, "hadamard_transform", file=path)
    codebook = _codebook(path, None, shared.get("codebook"))
    method = str(content.get("quantization_method", ""))
    return Metadata(notes, codebook, rotated, "tensor_metadata" in content, method, content, count)


def _method(value: Any) -> str:
    method = value.get("method") if isinstance(value, dict) else None
    return method if isinstance(method, str) else ""


def _listed(folder: Path, name: str, key: str, notes: dict[str, TensorNote]) -> dict[str, Any] | None:
    """Add the entries of a file that lists tensors to `notes`; returns its content, None if there is no such file."""
    path = member(folder, name)
    if path is None:
        return None
    content = strict_json.typed(strict_json.read(path, strict_json.INDEX), dict, name, file=path)
    _entries(path, content.get(key, []), key, notes)
    return content


def _entries(path: Path, listed: Any, key: str, notes: dict[str, TensorNote]) -> None:
    for entry in strict_json.typed(listed, list, key, file=path):
        fields = strict_json.typed(entry, dict, f"entry of {key}", file=path)
        name = strict_json.typed(fields.get("name"), str, "name", file=path)
        notes[name] = _note(path, name, fields)


def _note(path: Path, name: str, entry: Any) -> TensorNote:
    try:
        fields = strict_json.typed(entry, dict, "metadata of the tensor", file=path)
        bits = fields.get("bits")
        shape = fields.get("shape")
        blocks = fields.get("hadamard")
        return TensorNote(
            path,
            None if bits is None else strict_json.integer(bits, "bits", file=path),
            None if shape is None else _pair(shape, "shape", path),
            _codebook(path, name, fields.get("codebook")),
            None if blocks is None else _pair(blocks, "hadamard", path),
            _error(fields.get("mse")),
        )
    except InputError as e:
        raise InputError(e.message, file=path, tensor=name, expected=e.expected, found=e.found) from None


def _error(value: Any) -> float | None:
    """A mean squared error; None for invalid values, since it is only informative."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        return None
    return float(value)


def _pair(value: Any, what: str, path: Path) -> tuple[int, int]:
    numbers = strict_json.integers(value, what, file=path)
    if len(numbers) != 2:
        raise InputError(f"{what} must be two integers", file=path, found=list(numbers)[:8])
    return numbers[0], numbers[1]


def _codebook(path: Path, name: str | None, value: Any) -> Codebook | None:
    if value is None:
        return None
    fields = strict_json.typed(value, dict, "codebook", file=path)
    kind = strict_json.typed(fields.get("type"), str, "codebook type", file=path)
    window = fields.get("window_bits")
    if window is None and kind != "grid":
        raise InputError("codebook without window_bits", file=path, tensor=name, found=kind)
    order = strict_json.typed(fields.get("tile_order", "row_major"), str, "tile_order", file=path)
    if kind == "grid":
        return Codebook(kind, None, order)
    return Codebook(kind, strict_json.integer(window, "window_bits", file=path), order)
