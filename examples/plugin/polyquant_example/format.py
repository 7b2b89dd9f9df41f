"""The format `example`: a folder with weights.pqx, config.json and tokenizer files; or a single weights.pqx.

    "PQX1"
    header size    u32, little-endian
    header         JSON: {"alignment": 32, "tensors": {NAME: {"codec": "f32", "shape": [N, K],
                                                              "parts": {PART: offset in the file}}}}
    parts          each at a multiple of `alignment`

Shape and dtype of a part follow from the codec and the tensor's shape. Codecs: example.q6 and plain dtypes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from polyquant.errors import InputError, PlanError, PolyquantError
from polyquant.formats.folder_format import FolderFormat
from polyquant.formats.plain_target import PlainTarget
from polyquant.formats.protocol import Choice, Planning
from polyquant.formats.steps import Step
from polyquant.options import NoOptions, option
from polyquant.recipes.recipe import Recipe
from polyquant.registry import codec
from polyquant.storage import strict_json
from polyquant.storage.folder import SIDE_FILES, member, read_config
from polyquant.storage.source import FileArray, Source
from polyquant.types import (
    F32,
    Checkpoint,
    Codec,
    Evidence,
    FilePlan,
    Finding,
    Layout,
    Severity,
    Slot,
    TensorMap,
    Weight,
)
from polyquant_example.codec import Q6

__all__ = ["EXAMPLE"]

WEIGHTS, MAGIC, ALIGNMENT = "weights.pqx", b"PQX1", 32
_SUPPORTED = {
    Q6.name, "f64", "f32", "f16", "bf16", "f8_e4m3", "f8_e5m2", "i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64",
    "bool",
}  # fmt: skip


def _supported(codec: Codec) -> bool:
    return codec.name in _SUPPORTED


def _up(number: int, step: int) -> int:
    """Round up to a multiple of `step`."""
    return -(-number // step) * step


# ---------------------------------------------------------------- reading


def _file(path: Path) -> Path | None:
    """Return weights.pqx of a folder, or the file itself.

    None if missing. Raises InputError for a link that leaves the folder.
    """
    return member(path, WEIGHTS) if path.is_dir() else path


def _header(source: Source) -> dict[str, Any]:
    """Read the header of a file. Raises InputError."""
    if source.pread(0, 4).tobytes() != MAGIC:
        raise InputError("not a file of the example format", file=source.path, expected="PQX1")
    (size,) = struct.unpack("<I", source.pread(4, 4).tobytes())
    return strict_json.typed(
        strict_json.parse(source.pread(8, size), strict_json.HEADER, file=source.path), dict, "header", file=source.path
    )


def _alignment(header: Mapping[str, Any], file: Path) -> int:
    """Return the alignment in the header. Raises InputError."""
    alignment = strict_json.integer(header.get("alignment"), "alignment", low=1, file=file)
    if alignment & (alignment - 1):
        raise InputError("alignment is not a power of two", file=file, found=alignment)
    return alignment


def _weight(source: Source, name: str, fields: Any) -> Weight:
    """Return the weight of a header entry. Raises InputError, CodecError."""
    file = source.path
    entry = strict_json.typed(fields, dict, f"entry of {name}", file=file)
    shape = strict_json.integers(entry.get("shape"), f"shape of {name}", file=file)
    places = strict_json.typed(entry.get("parts"), dict, f"parts of {name}", file=file)
    if entry.get("codec") not in _SUPPORTED:
        raise InputError("codec not supported by this format", file=file, tensor=name, found=entry.get("codec"))
    kind = codec(entry["codec"])
    specs = kind.specs(shape)
    if set(specs) != set(places):
        raise InputError(
            "parts do not match the codec", file=file, tensor=name, expected=sorted(specs), found=sorted(places)
        )
    return Weight(name, shape, kind, {
        part: FileArray(source, strict_json.integer(places[part], f"offset of {name}", file=file), spec)
        for part, spec in specs.items()
    })  # fmt: skip


def _read(file: Path) -> tuple[dict[str, Any], dict[str, Weight]]:
    """Read the header and the weights. Raises InputError, CodecError."""
    source = Source(file)
    header = _header(source)
    _alignment(header, file)
    tensors = strict_json.typed(header.get("tensors"), dict, "tensors", file=file)
    return header, {name: _weight(source, name, said) for name, said in tensors.items()}


# ---------------------------------------------------------------- checking

FINDINGS = {
    "PQX001": "The header or a tensor's entry cannot be read: the file is truncated or modified and cannot be opened. "
    "Copy it again.",
    "PQX002": "A part is not at a multiple of the alignment declared in the header. polyquant reads it; a program that "
    "maps the file may fail. Write it again: polyquant convert OLD NEW --to example.",
    "PQX003": "Two parts share bytes, so at least one of them is wrong. Convert the source model again.",
    "PQX004": "There is no config.json next to the weights: they can be converted but not run. Copy it from the source "
    "model.",
}


def _check(path: Path) -> Iterator[Finding]:
    try:
        file = _file(path)
        if file is None:
            raise InputError("is missing", file=path / WEIGHTS)
        header, weights = _read(file)
        config = read_config(path) if path.is_dir() else None
    except PolyquantError as problem:
        yield Finding("PQX001", Severity.ERROR, problem.message, file=path.name)
        return
    if config is None:
        yield Finding("PQX004", Severity.WARNING, "no config.json", file=path.name)
    yield from _check_places(weights, header["alignment"])


def _check_places(weights: Mapping[str, Weight], alignment: int) -> Iterator[Finding]:
    placed = sorted(
        (array.offset, array.spec.nbytes, name)
        for name, weight in weights.items()
        for array in weight.arrays.values()
        if isinstance(array, FileArray)
    )
    end = 0
    for offset, nbytes, name in placed:
        if offset % alignment:
            yield Finding("PQX002", Severity.WARNING, f"offset {offset} is not a multiple of {alignment}", name)
        if offset < end:
            yield Finding("PQX003", Severity.ERROR, f"starts at {offset}, before the previous part ends at {end}", name)
        end = max(end, offset + nbytes)


# ---------------------------------------------------------------- writing


@dataclass(frozen=True, slots=True)
class ExampleOptions:
    """Options for writing."""

    alignment: int | None = option(
        help="Alignment of every part in bytes, a power of two.", type=int, low=1, high=65536,
        shown="32"
    )  # fmt: skip


class ExampleTarget(PlainTarget):
    """The target: example.q6 and plain dtypes."""

    options = ExampleOptions
    smaller: Mapping[str, Any] = MappingProxyType({"codec": Q6.name})

    def claims(self, asked: Mapping[str, Any]) -> bool:
        """Return True for the codec that only this format supports."""
        return asked.get("codec") == Q6.name

    def refuse(self, options: ExampleOptions, importance: Mapping[str, F32] | None) -> None:
        """Raise PlanError for an alignment that is not a power of two."""
        size = options.alignment
        if size is not None and (not 1 <= size <= 65536 or size & (size - 1)):
            raise PlanError("alignment must be a power of two from 1 to 65536", found=size)

    def recipe(self, chosen: Recipe, rules: Sequence[Any], options: ExampleOptions, *, named: bool) -> Recipe:
        """Return the recipe. Raises PlanError for a codec that this format does not support."""
        if chosen.base is not None and not _supported(codec(chosen.base)):
            raise PlanError(
                f"the example format does not support {chosen.base}", hint=f"choose --codec {Q6.name} or bf16"
            )
        return chosen.with_rules(rules)

    def kept(self, have: Codec, tensor: TensorMap) -> Choice:
        """Keep plain dtypes and codes of example.q6."""
        return Choice(have, "kept") if have.name == Q6.name else super().kept(have, tensor)

    def lay_out(self, planning: Planning, steps: Sequence[Step]) -> Layout:
        """Lay out weights.pqx and the other files. Raises PlanError for unsupported codecs."""
        alignment = planning.options.alignment or ALIGNMENT
        tensors: dict[str, Any] = {}
        specs, at = {}, 0
        for step in steps:
            if not _supported(step.target):
                raise PlanError(f"the example format does not support {step.target}", tensor=step.map.target)
            places = {}
            for part, spec in step.target.specs(step.map.shape).items():
                specs[step.map.target, part], places[part] = (at, spec), at
                at += _up(spec.nbytes, alignment)
            tensors[step.map.target] = {"codec": step.target.name, "shape": list(step.map.shape), "parts": places}
        header, start = _header_bytes(tensors, alignment)
        slots = {key: Slot(WEIGHTS, start + offset, spec) for key, (offset, spec) in specs.items()}
        small = [FilePlan(n, len(data), ((0, data),)) for n, data in planning.translation.files.items()]
        return Layout((FilePlan(WEIGHTS, start + at, ((0, header),)), *small), slots, folder=True)


def _header_bytes(tensors: Mapping[str, Any], alignment: int) -> tuple[bytes, int]:
    """Return the header and the start of the parts. Its size depends on the offsets and vice versa, so iterate."""
    start = 0
    while True:
        moved = {
            name: {**entry, "parts": {part: start + offset for part, offset in entry["parts"].items()}}
            for name, entry in tensors.items()
        }
        raw = json.dumps({"alignment": alignment, "tensors": moved}, separators=(",", ":")).encode()
        if (needed := _up(8 + len(raw), alignment)) <= start:
            return MAGIC + struct.pack("<I", len(raw)) + raw, start
        start = needed


class _Example(FolderFormat):
    name, title, priority = "example", "example folders", 40
    files = "a folder with weights.pqx"
    open_options: type = NoOptions
    target = ExampleTarget()
    findings: Mapping[str, str] = MappingProxyType(FINDINGS)

    def sniff(self, path: Path) -> Evidence | None:
        try:
            file = _file(path)
            matches = file is not None and file.is_file() and Source(file).pread(0, 4).tobytes() == MAGIC
        except InputError:
            return None
        return Evidence(self.name, "starts with PQX1") if matches else None

    def open(self, path: Path, options: Any) -> Checkpoint:
        file = _file(path)
        if file is None:
            raise InputError("is missing", file=path / WEIGHTS)
        _, weights = _read(file)
        if not path.is_dir():
            return Checkpoint(self.name, path, weights, notes=("single file; config.json was not read",))
        files = {name: found for name in SIDE_FILES if (found := member(path, name)) is not None}
        return Checkpoint(self.name, path, weights, config=read_config(path) or {}, files=files)

    def check(self, path: Path) -> Iterable[Finding]:
        return _check(path)

    def reads(self, codec: Codec) -> bool:
        return _supported(codec)

    def writes(self, codec: Codec) -> bool:
        return _supported(codec)

    def own_files(self, folder: Path, names: Iterable[str]) -> set[str]:
        return {n for n in names if n in (WEIGHTS, "config.json", *SIDE_FILES)}


EXAMPLE = _Example()
