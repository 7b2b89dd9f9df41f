"""The safetensors header: strict reader, and writer.

    0         8                8 + n            8 + n + size of all tensors = size of the file
    | u64 n   | JSON, n bytes  | tensor | tensor | ... |

    {"__metadata__": {"format": "pt"}, "NAME": {"dtype": "BF16", "shape": [N, K], "data_offsets": [begin, end]}, ...}

Offsets are relative to 8 + n; data is row-major and little-endian. Tensors cover the data without holes or overlaps,
and shape x dtype equals the byte range; both are checked in unbounded integers before allocating. The JSON is padded
with spaces to 8 bytes. Source: github.com/huggingface/safetensors (tensor.rs). Files written are byte-identical to its
own: tensors by descending dtype rank, then by name. The reader accepts more: tensors of unknown dtypes are read as
bytes, up to 8 weights per byte.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from polyquant.errors import InputError
from polyquant.storage import limits, strict_json
from polyquant.storage.parsed import recall, remember
from polyquant.storage.source import FileArray, Source
from polyquant.types import ArraySpec, Shape, StoredArray

__all__ = [
    "DTYPE_BITS",
    "Breach",
    "Entry",
    "Header",
    "header_bytes",
    "plausible",
    "read_header",
    "survey",
    "touch_header",
]

# Bits per element, in ascending order of rank in a file.
DTYPE_BITS: dict[str, int] = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
_RANK = {name: i for i, name in enumerate(DTYPE_BITS)}
_MAX_DIMENSIONS = 32
_MAX_NAME = 65_535
_MAX_EXTENT = 1 << 48  # product of the non-zero dimensions: an empty tensor must not claim the address space
_MAX_SIDE = 1 << 24  # of a matrix that is smaller than _MAX_EXTENT
_METADATA = "__metadata__"


class Entry(NamedTuple):
    """One tensor and its byte range in the file."""

    name: str
    dtype: str
    shape: Shape
    offset: int
    nbytes: int

    def array(self, source: Source, spec: ArraySpec) -> StoredArray:
        """Return the tensor's bytes as an array of `spec`, which has the same size."""
        return FileArray(source, self.offset, spec)


@dataclass(frozen=True, slots=True)
class Header:
    """A valid header: tensors in file order, and `__metadata__`."""

    entries: Mapping[str, Entry]
    metadata: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Breach:
    """A violation of a rule. rule: size, json, entry, bytes, order, truncated, trailing, metadata."""

    rule: str
    message: str
    tensor: str | None = None
    expected: object = None
    found: object = None

    def error(self, file: object) -> InputError:
        """Return the violation as an exception."""
        return InputError(self.message, file=file, tensor=self.tensor, expected=self.expected, found=self.found)


def plausible(source: Source) -> bool:
    """Return True if the first bytes look like a safetensors header, even a truncated or oversized one."""
    first = source.pread(0, min(source.size, 10)).tobytes()
    return first[8:] in (b'{"', b"{}", b"{ ", b"{\n") and int.from_bytes(first[:8], "little") >= 2


def touch_header(source: Source) -> None:
    """Read the bytes of the header of a safetensors file, for `fetch_ahead`. Raises InputError."""
    if plausible(source):
        _raw_header(source)


def read_header(source: Source) -> Header:
    """Read the header, but no tensors. Raises InputError at the first violation."""
    header, breaches = survey(source, most=1)
    for breach in breaches:
        raise breach.error(source.path)
    return header


def survey(source: Source, most: int = 1000) -> tuple[Header, list[Breach]]:
    """Read as much of a header as possible, and collect all violations. Stops after `most` invalid descriptions."""
    if (known := recall(source)) is not None:
        return known, []
    header, breaches = _survey(source, most)
    if not breaches:
        remember(source, header)
    return header, breaches


def _survey(source: Source, most: int) -> tuple[Header, list[Breach]]:
    try:
        length, raw = _raw_header(source)
    except InputError as e:
        return Header({}, {}), [Breach("size", e.message, None, e.expected, e.found)]
    try:
        content = strict_json.typed(strict_json.parse(raw, strict_json.HEADER), dict, "safetensors header")
    except InputError as e:
        return Header({}, {}), [Breach("json", e.message, None, e.expected, e.found)]
    del raw
    breaches: list[Breach] = []
    metadata = content.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        breaches.append(Breach("metadata", "__metadata__ must map strings to strings"))
        metadata = {}
    entries = []
    for name, fields in content.items():
        try:
            entries.append(_entry(name, fields, 8 + length))
        except InputError as e:
            breaches.append(Breach("entry", e.message, name[:200], e.expected, e.found))
            if len(breaches) >= most:
                break
    entries.sort(key=lambda e: (e.offset, e.offset + e.nbytes))
    breaches.extend(filter(None, map(_size_breach, entries)))
    # An invalid description leaves a hole, which is not reported again.
    if not any(b.rule == "entry" for b in breaches):
        breaches.extend(_chain(entries, 8 + length, source.size))
    return Header({e.name: e for e in entries}, metadata), breaches


def _raw_header(source: Source) -> tuple[int, Any]:
    if source.size < 8:
        raise InputError("too short for a safetensors file", expected="at least 8 bytes", found=source.size)
    length = int.from_bytes(source.pread(0, 8).tobytes(), "little")
    if length > strict_json.HEADER.nbytes:
        raise InputError(
            "safetensors header is too large", expected=f"at most {strict_json.HEADER.nbytes}", found=length
        )
    if length > source.size - 8:
        raise InputError("safetensors header runs past the end", expected=f"{8 + length} bytes", found=source.size)
    raw = source.pread(8, length)
    if length < 2 or raw[0] != 0x7B:
        raise InputError("safetensors header does not start with {")
    return length, raw


def _entry(name: str, fields: Any, start: int) -> Entry:
    if (usual := _usual_entry(name, fields, start)) is not None:
        return usual
    if len(name) > _MAX_NAME:
        raise InputError("tensor name is too long", expected=f"at most {_MAX_NAME} characters", found=len(name))
    fields = strict_json.typed(fields, dict, "tensor description")
    try:
        dtype, dimensions, span = fields["dtype"], fields["shape"], fields["data_offsets"]
    except KeyError as key:
        raise InputError(f"tensor description lacks {key.args[0]}") from None
    dtype = strict_json.typed(dtype, str, "dtype")
    rank = len(strict_json.typed(dimensions, list, "shape"))
    if rank > _MAX_DIMENSIONS:
        raise InputError("too many dimensions", expected=f"at most {_MAX_DIMENSIONS}", found=rank)
    shape = strict_json.integers(dimensions, "shape")
    if math.prod(filter(None, shape)) > (limits.EMPTY_EXTENT if 0 in shape else _MAX_EXTENT):
        raise InputError("shape is larger than any file", found=list(shape))
    if len(strict_json.typed(span, list, "data_offsets")) != 2:
        raise InputError("data_offsets must be [begin, end]", found=f"{len(span)} values")
    begin, end = strict_json.integers(span, "data_offsets")
    if begin > end:
        raise InputError("data_offsets must be [begin, end]", found=[begin, end])
    return Entry(name, dtype, shape, start + begin, end - begin)


def _usual_entry(name: str, fields: Any, start: int) -> Entry | None:
    """The entry of a valid matrix or vector without checks that these cannot fail; None for all others."""
    if type(fields) is not dict or len(name) > _MAX_NAME:
        return None
    dtype, dimensions, span = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if type(dtype) is not str or type(dimensions) is not list or type(span) is not list or len(span) != 2:
        return None
    begin, end = span
    n, k = dimensions if len(dimensions) == 2 else (1, *dimensions) if len(dimensions) == 1 else (0, 0)
    if not (type(begin) is type(end) is type(n) is type(k) is int):
        return None
    if not (0 <= begin <= end and 0 < n < _MAX_SIDE and 0 < k < _MAX_SIDE):
        return None
    return Entry(name, dtype, tuple(dimensions), start + begin, end - begin)


def _size_breach(e: Entry) -> Breach | None:
    count = math.prod(e.shape)
    bits = DTYPE_BITS.get(e.dtype)
    if bits is None:
        if count > 8 * e.nbytes:
            return Breach("bytes", f"{e.nbytes} bytes cannot hold {count} elements of {e.dtype}", e.name)
    elif count * bits != 8 * e.nbytes:
        return Breach(
            "bytes",
            f"byte range does not fit {e.dtype} {list(e.shape)}",
            e.name,
            expected=f"{count * bits / 8:.15g} bytes",
            found=e.nbytes,
        )
    return None


def _chain(entries: list[Entry], start: int, size: int) -> Iterator[Breach]:
    """Yield violations of the rule that tensors cover [start, size) without holes or overlaps."""
    at = start
    for e in entries:
        if e.offset != at:
            problem = "leaves a hole before its data" if e.offset > at else "overlaps the tensor before it"
            yield Breach("order", problem, e.name, expected=f"offset {at - start}", found=e.offset - start)
        if e.offset + e.nbytes > size:
            yield Breach("truncated", "data ends after the file does", e.name, f"{e.offset + e.nbytes} bytes", size)
        at = max(at, e.offset + e.nbytes)
    if at < size:
        yield Breach("trailing", "bytes after the last tensor", None, expected=f"{at} bytes", found=size)


_json = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode


def header_bytes(tensors: Iterable[tuple[str, str, Shape]], metadata: Mapping[str, str]) -> tuple[bytes, list[Entry]]:
    """Return the header for tensors of (name, dtype, shape), and the position of each; the file ends with the last one.

    Raises InputError if a tensor does not fill whole bytes, KeyError for a dtype without a known size.
    """
    ordered = sorted(tensors, key=lambda t: (-_RANK[t[1]], t[0]))
    members = [f'"{_METADATA}":{_json(dict(sorted(metadata.items())))}'] if metadata else []
    spans, at = [], 0
    for name, dtype, shape in ordered:
        bits = math.prod(shape) * DTYPE_BITS[dtype]
        if bits % 8:
            raise InputError(f"{dtype} {list(shape)} does not fill whole bytes", tensor=name)
        members.append(
            f'{_json(name)}:{{"dtype":"{dtype}","shape":{_json(shape)},"data_offsets":[{at},{at + bits // 8}]}}'
        )
        spans.append((name, dtype, shape, at, bits // 8))
        at += bits // 8
    text = ("{" + ",".join(members) + "}").encode()
    del members
    text += b" " * (-len(text) % 8)
    start = len(text) + 8
    entries = [Entry(name, dtype, shape, start + begin, nbytes) for name, dtype, shape, begin, nbytes in spans]
    return len(text).to_bytes(8, "little") + text, entries
