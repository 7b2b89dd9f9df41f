"""Lay out GGUF files: header bytes, exact offsets and sizes before any payload.

The output is accepted by the strictest reader (llama.cpp): version 3, little-endian, offsets are the padded running
sum, every tensor is padded, including the last; no padding and no data section without tensors. Split files follow
llama.cpp's naming and keys: file 1 of N has all metadata, each file its own part of the tensors.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from polyquant.codecs.opaque import OpaqueCodec
from polyquant.errors import PlanError, printable
from polyquant.formats.gguf.dialect import number_of
from polyquant.formats.gguf.values import Order, encode
from polyquant.storage import limits
from polyquant.types import ArraySpec, Codec, FilePlan, Kind, Layout, Meta, Slot, TensorSpec

__all__ = ["encode_entry", "encode_header", "encode_tensor", "lay_out", "type_number"]

_FLOAT32 = 0
_BITNET_IDS = {36, 38, 39}
_MAINLINE_ONLY = {"mxfp4", "nvfp4", "q1_0", "q2_0"}


def type_number(codec: Codec) -> int:
    """The GGUF type number of a codec. Raises PlanError if it has none."""
    if isinstance(codec, OpaqueCodec) and codec.type_id >= 0:
        return codec.type_id
    number = number_of(codec.name)
    if number is None:
        raise PlanError(
            f"GGUF has no type for {codec.name}", hint="choose a codec that GGUF supports, e.g. f16, q8_0 or q4_k"
        )
    return number


def encode_entry(key: str, meta: Meta, order: Order = "<") -> bytes:
    """Encode [length][key][kind][value]. Raises PlanError for keys and values that cannot be written."""
    return encode_key(key, order) + encode(key, meta, order)


def encode_key(key: str, order: Order = "<") -> bytes:
    """Encode [length][key]. Raises PlanError for keys that are empty, too long or not valid text."""
    raw = _text(key, "key", key)
    if not 0 < len(raw) <= limits.GGUF_KEY_BYTES:
        raise PlanError("a metadata key must have 1 to 65535 bytes", found=printable(key, 40))
    return struct.pack(order + "Q", len(raw)) + raw


def encode_tensor(name: str, shape: Sequence[int], type_id: int, offset: int, order: Order = "<") -> bytes:
    """Encode one tensor's entry. Raises PlanError for names and shapes that llama.cpp rejects."""
    raw = _text(name, "tensor name", name)
    if not 0 < len(raw) <= limits.GGUF_NAME_BYTES:
        raise PlanError("a tensor name must have 1 to 63 bytes in GGUF", tensor=name, found=f"{len(raw)} bytes")
    if len(shape) > limits.GGUF_DIMENSIONS:
        raise PlanError("GGUF supports at most 4 dimensions", tensor=name, found=f"shape {list(shape)}")
    dims = tuple(shape)[::-1] or (1,)
    return struct.pack(f"{order}Q{len(raw)}sI{len(dims)}QIQ", len(raw), raw, len(dims), *dims, type_id, offset)


def encode_header(tensors: Sequence[bytes], entries: Sequence[bytes], alignment: int, order: Order = "<") -> bytes:
    """Encode the whole header, padded to the start of the data if there are tensors."""
    raw = b"".join([b"GGUF", struct.pack(f"{order}IQQ", 3, len(tensors), len(entries)), *entries, *tensors])
    return raw + bytes(-len(raw) % alignment) if tensors else raw


def _text(text: str, what: str, shown: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as e:
        raise PlanError(f"a {what} is not valid text: '{printable(shown, 60)}'") from e


@dataclass(frozen=True, slots=True)
class _Sized:
    """A tensor with known size, ready to be placed."""

    spec: TensorSpec
    type_id: int
    part: str
    array: ArraySpec
    name: str
    shape: Sequence[int]


def _sizes(spec: TensorSpec) -> list[_Sized]:
    """The tensors in the file of one weight: itself, and its scale, X.scale next to X.weight."""
    if 0 in spec.shape:
        raise PlanError(
            "is empty, which llama.cpp does not support", tensor=spec.name, found=f"shape {list(spec.shape)}"
        )
    if math.prod(spec.shape) >= 1 << 63:
        raise PlanError("has 2^63 or more elements", tensor=spec.name)
    rows, columns = spec.codec.granule
    width = spec.shape[-1] if spec.shape else 1
    if width % columns or (len(spec.shape) > 1 and math.prod(spec.shape[:-1]) % rows):
        raise PlanError(
            f"{spec.codec.name} cannot store this shape",
            tensor=spec.name,
            expected=f"multiples of {[rows, columns]}",
            found=f"shape {list(spec.shape)}",
            hint="choose a codec with smaller blocks for it, e.g. q8_0 or f16",
        )
    number = type_number(spec.codec)
    (part, array), *more = spec.codec.specs(spec.shape).items()
    stem = spec.name.removesuffix("weight")
    if more and stem == spec.name:
        raise PlanError("only tensors named *.weight can have a scale", tensor=spec.name, found=spec.codec.name)
    scales = [_Sized(spec, _FLOAT32, key, a, stem + key, a.shape) for key, a in more]
    return [_Sized(spec, number, part, array, spec.name, spec.shape), *scales]


def _reject_mixed_dialects(sized: Sequence[_Sized]) -> None:
    """Raise PlanError if a type number would have two meanings in one file."""
    meanings: dict[int, str] = {}
    for s in sized:
        if s.type_id == _FLOAT32:
            continue
        name = s.spec.codec.name.partition(".scaled")[0]
        if meanings.setdefault(s.type_id, name) != name:
            raise PlanError(
                f"{meanings[s.type_id]} and {name} have the same type number in GGUF",
                tensor=s.spec.name,
                hint="use one of them",
            )
    names = set(meanings.values())
    if (bitnet := {n for i, n in meanings.items() if i in _BITNET_IDS} - {"mxfp4"}) and (
        mainline := names & _MAINLINE_ONLY
    ):
        raise PlanError(
            f"no program reads {min(bitnet)} and {min(mainline)} in one file",
            hint="use tq2_0 with the types of llama.cpp",
        )


def _members(sized: Sequence[_Sized], alignment: int, split_bytes: int | None) -> list[list[_Sized]]:
    """Tensors of each file, in order; a file is filled until the next tensor would exceed split_bytes."""
    if split_bytes is None:
        return [list(sized)]
    groups: list[list[_Sized]] = [[]]
    filled = 0
    for s in sized:
        padded = -(-s.array.nbytes // alignment) * alignment
        if groups[-1] and filled + padded > split_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(s)
        filled += padded
    return groups


def lay_out(
    tensors: Sequence[TensorSpec],
    metadata: Mapping[str, Meta],
    *,
    name: str = "model.gguf",
    alignment: int = 32,
    split_bytes: int | None = None,
) -> Layout:
    """Lay out files, header bytes and the place of every part, from shapes alone.

    metadata: written in order, without `split.*`; `general.alignment` is set from `alignment` (omitted if 32).
    split_bytes: maximum tensor bytes per file (a larger tensor gets its own file). Raises PlanError for tensors or
    metadata that GGUF cannot store.
    """
    least, most = limits.GGUF_ALIGNMENT
    if not least <= alignment <= most or alignment & (alignment - 1):
        raise PlanError(f"alignment must be a power of two from {least} to {most}", found=alignment)
    sized = [s for t in tensors for s in _sizes(t)]
    names = [s.name for s in sized]
    if len(set(names)) != len(names):
        raise PlanError("two tensors have the same name", tensor=next(n for n in names if names.count(n) > 1))
    _reject_mixed_dialects(sized)
    groups = _members(sized, alignment, split_bytes)
    kept = {k: v for k, v in metadata.items() if k != "general.alignment" and not k.startswith("split.")}
    forced = {} if alignment == 32 else {"general.alignment": Meta(Kind.UINT32, alignment)}
    files, slots = [], {}
    stem = name.removesuffix(".gguf")
    for i, group in enumerate(groups):
        entries = kept if i == 0 else {}
        file = name
        if len(groups) > 1:
            file = f"{stem}-{i + 1:05}-of-{len(groups):05}.gguf"
            entries = {**entries, **_split_keys(i, len(groups), len(sized))}
        plan, placed = _one_file(file, group, {**entries, **forced}, alignment)
        files.append(plan)
        slots.update(placed)
    return Layout(tuple(files), slots, folder=False)


def _split_keys(no: int, count: int, tensors: int) -> dict[str, Meta]:
    if count > limits.GGUF_SPLIT_FILES:
        raise PlanError(
            "too many split files",
            expected=f"at most {limits.GGUF_SPLIT_FILES}",
            found=count,
            hint="split into larger files",
        )
    return {
        "split.no": Meta(Kind.UINT16, no),
        "split.count": Meta(Kind.UINT16, count),
        "split.tensors.count": Meta(Kind.INT32, tensors),
    }


def _one_file(
    file: str, group: Sequence[_Sized], metadata: Mapping[str, Meta], alignment: int
) -> tuple[FilePlan, dict[tuple[str, str], Slot]]:
    offsets, at = [], 0
    for s in group:
        offsets.append(at)
        at += -(-s.array.nbytes // alignment) * alignment
    infos = [encode_tensor(s.name, s.shape, s.type_id, o) for s, o in zip(group, offsets, strict=True)]
    header = encode_header(infos, [encode_entry(k, v) for k, v in metadata.items()], alignment)
    slots = {(s.spec.name, s.part): Slot(file, len(header) + o, s.array) for s, o in zip(group, offsets, strict=True)}
    return FilePlan(file, len(header) + at, ((0, header),)), slots
