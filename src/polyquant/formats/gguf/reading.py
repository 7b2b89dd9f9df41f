"""Open GGUF files: header, dialect, one Weight per tensor. A split model is opened through any of its files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from polyquant.capabilities import Swappable, Tile, Tiled
from polyquant.codecs.opaque import OpaqueCodec
from polyquant.errors import InputError, PlanError, UnknownNameError
from polyquant.formats.gguf.dialect import detect
from polyquant.formats.gguf.header import Header, Metadata, read_header
from polyquant.formats.gguf.options import LAYOUTS
from polyquant.formats.gguf.place import Placed, place
from polyquant.registry import codec as named_codec
from polyquant.rows import in_memory
from polyquant.storage import limits
from polyquant.storage.locations import located
from polyquant.storage.source import FileArray, Source, Swap, fetch_ahead, foreign
from polyquant.types import ArraySpec, Checkpoint, Evidence, Kind, StoredArray, Undecoded, Weight

__all__ = ["LAYOUTS", "members", "open_gguf", "sniff", "split_number", "with_tile"]

_MEMBER = re.compile(r"(?P<stem>.+)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf", re.ASCII)


def sniff(path: str | Path) -> Evidence | None:
    """Evidence if the file starts with a GGUF header, regardless of its name; None for anything else, including
    folders.
    """
    try:
        source = Source(path)
        head = source.pread(0, 8).tobytes() if source.size >= 8 else b""
    except InputError:
        return None
    if head[:4] != b"GGUF":
        return None
    low = int.from_bytes(head[4:], "little")
    big = not low & 0xFFFF
    version = int.from_bytes(head[4:], "big") if big else low
    return Evidence("gguf", f"starts with the bytes GGUF, version {version}{', big-endian' if big else ''}")


def split_number(header: Header, key: str) -> int | None:
    """The value of `split.no`, `split.count` or `split.tensors.count`, of any integer type; None if missing."""
    entry = header.entries.get(key)
    if entry is None or entry.kind in (Kind.STRING, Kind.ARRAY, Kind.BOOL, Kind.FLOAT32, Kind.FLOAT64):
        return None
    return int(header.typed(key).value)


def members(header: Header) -> list[Path]:
    """All files of this file's model, in order. Raises InputError if some are missing or the name has no number."""
    path, count = header.source.path, split_number(header, "split.count")
    if count is None or count <= 1:
        return [path]
    match = _MEMBER.fullmatch(path.name)
    if match is None or int(match["count"]) != count or count > limits.GGUF_SPLIT_FILES:
        raise InputError(
            "is part of a split model, but its name has no valid number",
            file=path,
            expected=f"a name like model-00001-of-{count:05}.gguf",
            hint="give the files their original names",
        )
    paths = [path.with_name(f"{match['stem']}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]
    fetch_ahead(paths, read_header)
    missing = [p.name for p in paths if not p.exists()]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise InputError(
            f"files of this split model are missing: {', '.join(missing[:3])}{more}",
            file=path,
            hint="put all files into one folder",
        )
    return paths


def headers(path: str | Path) -> Iterator[Header]:
    """The header of every file of the model, the first one first. Raises InputError if they are inconsistent."""
    first = read_header(Source(path))
    paths = members(first)
    for no, member in enumerate(paths):
        header = first if member == first.source.path else read_header(Source(member))
        if len(paths) > 1 and (split_number(header, "split.no"), split_number(header, "split.count")) != (
            no,
            len(paths),
        ):
            raise InputError("split.no contradicts the file name", file=member, expected=no)
        yield header


def open_gguf(path: str | Path, *, dialect: str | None = None, ternary_layout: str | None = None) -> Checkpoint:
    """Open a GGUF file, or all files of a split model. Reads headers only.

    dialect: one of DIALECTS instead of the detected one; ternary_layout: meaning of type 36 (LAYOUTS), which the file
    does not specify. Raises InputError for files that llama.cpp rejects as broken (`check` lists all violations),
    UnknownNameError.
    """
    if ternary_layout is not None and ternary_layout not in LAYOUTS:
        raise UnknownNameError("ternary layout", ternary_layout, LAYOUTS)
    if ternary_layout == "trinity.i2_s" and dialect is None:
        dialect = "trinity"
    weights: dict[str, Weight] = {}
    all_headers = list(headers(path))
    dialects = [detect(h, dialect) for h in all_headers]
    evidence = next((e for e in dialects if e.name != "mainline"), dialects[0])
    notes = []
    for header in all_headers:
        placed = place(header, evidence.name)
        if (error := header.findings.first_error()) is not None:
            raise InputError(
                error.message, file=header.source.path, tensor=error.tensor, hint=f"`polyquant explain {error.code}`"
            )
        for p in placed:
            if p.info.name in weights:
                raise InputError(
                    "two files of this split model contain the same tensor", file=header.source.path, tensor=p.info.name
                )
            weights[p.info.name] = _weight(header, p, ternary_layout)
        notes += [
            f"{f.code} {f.message}" for f in header.findings if f.code in ("GGUF009", "GGUF021", "GGUF022", "GGUF024")
        ]
    notes += _unknown(weights)
    first = all_headers[0]
    expected = split_number(first, "split.tensors.count") if len(all_headers) > 1 else None
    if expected is not None and expected != len(weights):
        raise InputError(
            "tensors are missing from the files of this split model", file=path, expected=expected, found=len(weights)
        )
    weights = _with_scales(weights)
    return Checkpoint(
        "gguf", located(path), weights, metadata=Metadata(first), dialect=evidence, notes=tuple(notes), naming="gguf",
        undecoded=_misfits(located(path), weights),
    )  # fmt: skip


def _with_scales(weights: dict[str, Weight]) -> dict[str, Weight]:
    """Weights of which some have scales X.scale and X.input_scale next to X.weight, as parts of these.

    A stack of experts has one scale for each. Scales that are all 1 are omitted.
    """
    out = dict(weights)
    for name, weight in weights.items():
        scales = _scales(weights, name)
        if not scales or any(_misfit(weight, scale) for scale in scales.values()):
            continue
        stacked, static = len(weight.shape) == 3, "input_scale" in scales
        arrays = {**weight.arrays, **in_memory({"scale": np.ones(weight.shape[0] if stacked else 1, np.float32)})}
        arrays |= {key: _vector(scale) for key, scale in scales.items()}
        words = ["nvfp4.scaled", *["static"] * static, *[f"r{weight.shape[-2]}"] * stacked]
        out[name] = replace(weight, codec=named_codec(".".join(words)), arrays=arrays)
        for scale in scales.values():
            del out[scale.name]
    return out


def _scales(weights: Mapping[str, Weight], name: str) -> dict[str, Weight]:
    """The tensors with scales of an NVFP4 weight."""
    if weights[name].codec.name != "nvfp4" or not name.endswith(".weight"):
        return {}
    found = {key: weights.get(name.removesuffix("weight") + key) for key in ("scale", "input_scale")}
    return {key: weight for key, weight in found.items() if weight is not None}


def _misfit(weight: Weight, scale: Weight) -> bool:
    """True for a tensor that is not a scale of this weight: not f32 [1], or [experts] for a stack."""
    count = weight.shape[0] if len(weight.shape) == 3 else 1
    return scale.shape != (count,) or scale.codec.name != "f32"


def _misfits(path: Path, weights: Mapping[str, Weight]) -> Undecoded | None:
    """The reason to refuse a file with scales that do not fit their weights."""
    for name, weight in weights.items():
        for scale in _scales(weights, name).values():
            if _misfit(weight, scale):
                found = f"{scale.name} {scale.codec} {list(scale.shape)}"
                return Undecoded("NVFP4 with scales that do not fit it", "GGUF037", path, name, found)
    return None


def _vector(weight: Weight) -> StoredArray:
    """The array of a tensor f32 [n]."""
    (array,) = weight.arrays.values()
    if isinstance(array, FileArray) and array.swap is None:
        return replace(array, spec=ArraySpec(weight.shape, np.dtype(np.float32)))
    return in_memory({"scale": weight.dequantize().reshape(-1)})["scale"]


def _unknown(weights: dict[str, Weight]) -> list[str]:
    ids = sorted({w.codec.type_id for w in weights.values() if isinstance(w.codec, OpaqueCodec)})
    return [f"type {i} cannot be decoded, only copied" for i in ids]


def _weight(header: Header, placed: Placed, ternary_layout: str | None) -> Weight:
    info, meaning, source = placed.info, placed.meaning, header.source
    offset, shape = header.data + info.offset, info.shape
    name = meaning.codec if meaning is not None else None
    if name is not None and info.type_id == 36 and ternary_layout is not None:
        if (name == "trinity.i2_s") != (ternary_layout == "trinity.i2_s"):
            message = f"the tensor sizes in this file match {name}, not {ternary_layout}"
            raise PlanError(message, file=source.path, tensor=info.name)
        name = ternary_layout
    why = "polyquant does not know this type"
    if meaning is not None and name is not None:
        codec = named_codec(name)
        swapped = foreign(header.order)
        fields = codec.fields if swapped and isinstance(codec, Swappable) else None
        if fields is not None or not swapped:
            swap = Swap(meaning.nbytes, fields) if fields else None
            # For whole-tensor types the size may depend on a tiling that the file does not store: use the file's size.
            spec = ArraySpec((placed.nbytes,), np.dtype(np.uint8)) if meaning.whole else codec.specs(shape)["blocks"]
            return Weight(info.name, shape, codec, {"blocks": FileArray(source, offset, spec, swap)})
        why = f"{name} has no big-endian form"
    opaque = OpaqueCodec(info.type_id, placed.nbytes, why)
    return Weight(info.name, shape, opaque, {"bytes": FileArray(source, offset, opaque.specs(shape)["bytes"])})


def with_tile(checkpoint: Checkpoint, tile: Tile) -> Checkpoint:
    """The checkpoint with this tile for its TL1 and TL2 tensors."""
    weights = {
        w.name: replace(w, codec=w.codec.with_tile(tile)) if isinstance(w.codec, Tiled) else w
        for w in checkpoint.values()
    }
    return replace(checkpoint, weights=weights)
