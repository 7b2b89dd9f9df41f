"""The header of a GGUF file: read once, strictly, with every count checked against the remaining bytes.

    [GGUF][version u32][tensors u64][keys u64]
    keys    x ([length u64][key][kind u32][value, see values.py])
    tensors x ([length u64][name][dimensions u32][u64 x dimensions, fastest first][type u32][offset u64])
    [zeros to the alignment][data: offsets count from here]       padded only if there are tensors

Version 1 has u32 counts, lengths and dimensions; version 2 equals 3; 3 may be big-endian (shown by the version number).
Values are not decoded here: an Entry has the position of its value. What llama.cpp rejects becomes an error in
`Header.findings`; damage that makes the rest unreadable raises HeaderError. Sources: ggml/docs/gguf.md,
ggml/src/gguf.cpp of llama.cpp 0c1e570.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from struct import Struct
from typing import Any

import numpy as np

from polyquant.errors import InputError, printable
from polyquant.formats.gguf.cursor import Cursor, HeaderError, IncompleteError
from polyquant.formats.gguf.findings import Findings
from polyquant.formats.gguf.values import FORMATS, NumberArray, Order, StringArray
from polyquant.storage import limits
from polyquant.storage.source import Source
from polyquant.types import U8, Kind, Meta, Shape

__all__ = ["Entry", "Header", "Metadata", "TensorInfo", "read_header"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One key's value: the position of its bytes, and item type and count of arrays."""

    kind: Kind
    start: int
    end: int
    item: Kind | None = None
    count: int = 0


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor's entry. offset: from the start of the data."""

    name: str
    shape: Shape
    type_id: int
    offset: int

    @property
    def elements(self) -> int:
        """Number of weights."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Header:
    """The parsed header. buffer: at least its bytes; order: "<" or ">"; size: bytes of keys and tensor entries; data:
    start of the data.
    """

    source: Source
    buffer: U8
    version: int
    order: Order
    entries: dict[str, Entry]
    tensors: list[TensorInfo]
    alignment: int
    size: int
    data: int
    findings: Findings

    @property
    def wide(self) -> bool:
        """True for 64-bit counts and lengths."""
        return self.version > 1

    def value_bytes(self, key: str) -> bytes:
        """The stored bytes of a value, without its kind (arrays: with item kind and count)."""
        entry = self.entries[key]
        return self.buffer[entry.start : entry.end].tobytes()

    def typed(self, key: str) -> Meta:
        """The value of a key with its stored type. Raises InputError for a string that is not UTF-8."""
        entry = self.entries[key]
        return Meta(entry.kind, _decode(self, key, entry.kind, entry.start, entry.end), entry.item)


class Metadata(Mapping[str, Any]):
    """Keys to Python values, decoded on access: numbers, bools, strings, and sequences for arrays.

    Sequences compare equal to lists and have `tolist()`; nested arrays are tuples. `typed(key)` keeps the stored type.
    """

    __slots__ = ("_cache", "_header")

    def __init__(self, header: Header) -> None:
        self._header = header
        self._cache: dict[str, Meta] = {}

    def typed(self, key: str) -> Meta:
        """The value with its stored type. Raises KeyError; InputError for a string that is not UTF-8."""
        if key not in self._cache:
            self._cache[key] = self._header.typed(key)
        return self._cache[key]

    def items_typed(self) -> Iterator[tuple[str, Meta]]:
        """(key, Meta) in file order."""
        return ((key, self.typed(key)) for key in self)

    def __getitem__(self, key: str) -> Any:
        return self.typed(key).value

    def __contains__(self, key: object) -> bool:
        return key in self._header.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._header.entries)

    def __len__(self) -> int:
        return len(self._header.entries)

    def __repr__(self) -> str:
        return f"<metadata: {len(self)} keys>"


def _decode(header: Header, key: str, kind: Kind, start: int, end: int) -> Any:
    """Decode one value; its bounds were checked when the header was read."""
    buffer, order, wide = header.buffer, header.order, header.wide
    if kind is Kind.STRING:
        try:
            return buffer[start + (8 if wide else 4) : end].tobytes().decode()
        except UnicodeDecodeError as e:
            raise InputError(
                f"the value of '{printable(key)}' is not UTF-8",
                file=header.source.path,
                hint="`polyquant edit` can replace it",
            ) from e
    if kind is Kind.BOOL:
        return bool(buffer[start])
    if kind is not Kind.ARRAY:
        return Struct(order + FORMATS[kind]).unpack_from(buffer.data, start)[0]
    cursor = Cursor(buffer, start, order, wide, header.source)
    item, count = cursor.array_head(key)
    if item is Kind.ARRAY:
        items = []
        for _ in range(count):
            a = cursor.at
            cursor.skip_value(Kind.ARRAY, key)
            items.append(_decode(header, key, Kind.ARRAY, a, cursor.at))
        return tuple(items)
    if item is Kind.STRING:
        return StringArray(buffer, cursor.at, end, count, big=order == ">", wide=wide, name=key)
    dtype = np.dtype("?" if item is Kind.BOOL else FORMATS[item]).newbyteorder(order)
    raw = buffer[cursor.at : end]
    return NumberArray(item, raw if item is Kind.BOOL else raw.view(dtype))


def read_header(source: Source) -> Header:
    """Read keys and tensor entries. Raises HeaderError if the header cannot be parsed; lesser violations go to
    `findings`.
    """
    need = 16
    while True:
        try:
            return _parsed(source, source.start(need))
        except IncompleteError as more:  # of a remote file, only a part was fetched
            need = more.need


def _parsed(source: Source, buffer: U8) -> Header:
    findings = Findings(printable(source.path.name))
    if len(buffer) < 16 or buffer[:4].tobytes() != b"GGUF":
        raise HeaderError(
            "GGUF001",
            "is not a GGUF file",
            file=source.path,
            expected="GGUF at the start",
            found=repr(buffer[:4].tobytes())[1:] if len(buffer) >= 16 else f"{len(buffer)} bytes",
        )
    number = buffer[4:8].tobytes()
    order: Order = "<" if int.from_bytes(number, "little") & 0xFFFF else ">"
    version = int.from_bytes(number, "little" if order == "<" else "big")
    if not 1 <= version <= 3:
        raise HeaderError(
            "GGUF002", "has an unknown GGUF version", file=source.path, expected="1, 2 or 3", found=version
        )
    cursor = Cursor(buffer, 8, order, version > 1, source)
    n_tensors, n_keys = cursor.length("the counts"), cursor.length("the counts")
    cursor.room(n_keys, 4 + (8 if cursor.wide else 4), "keys", limits.GGUF_KEYS)
    cursor.room(n_tensors, 16 + (8 if cursor.wide else 4), "tensors", limits.GGUF_TENSORS)
    entries = _read_entries(cursor, n_keys, findings)
    alignment = _alignment(cursor, entries, findings)
    tensors = _read_tensors(cursor, n_tensors, findings)
    data = -(-cursor.at // alignment) * alignment if tensors else cursor.at
    return Header(source, buffer, version, order, entries, tensors, alignment, cursor.at, data, findings)


def _name(raw: bytes, what: str, findings: Findings) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        shown = raw.decode(errors="backslashreplace")
        findings.error("GGUF007", f"a {what} is not UTF-8: '{printable(shown, 60)}'")
        return shown


def _read_entries(cursor: Cursor, count: int, findings: Findings) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    for _ in range(count):
        key = _name(cursor.text("a key", limits.GGUF_KEY_BYTES), "key", findings)
        if not key:
            findings.error("GGUF005", "a key is empty")
        elif key in entries:
            findings.error("GGUF006", f"the key '{printable(key)}' occurs twice")
        kind, start = cursor.kind(key), cursor.at
        item, items = None, 0
        if kind is Kind.ARRAY:
            item, items = cursor.array_head(key)
            cursor.at = start
            if item is Kind.ARRAY:
                findings.warning("GGUF009", f"'{printable(key)}' is an array of arrays")
        cursor.skip_value(kind, key)
        entries.setdefault(key, Entry(kind, start, cursor.at, item, items))
    return entries


def _alignment(cursor: Cursor, entries: dict[str, Entry], findings: Findings) -> int:
    entry = entries.get("general.alignment")
    if entry is None:
        return 32
    if entry.kind is not Kind.UINT32:
        findings.error("GGUF012", "general.alignment is not a uint32", None)
        return 32
    value = int(Struct(cursor.order + "I").unpack_from(cursor.view, entry.start)[0])
    least, most = limits.GGUF_ALIGNMENT
    if not least <= value <= most or value & (value - 1):
        findings.error("GGUF011", f"general.alignment is {value}, not a power of two from {least} to {most}")
        return 32
    return value


def _read_tensors(cursor: Cursor, count: int, findings: Findings) -> list[TensorInfo]:
    tensors: list[TensorInfo] = []
    seen: set[str] = set()
    letter = "Q" if cursor.wide else "I"
    shapes = [Struct(f"{cursor.order}{n}{letter}") for n in range(limits.GGUF_DIMENSIONS + 1)]
    place = Struct(cursor.order + "IQ")
    for _ in range(count):
        raw = cursor.text("a tensor name", limits.GGUF_KEY_BYTES)
        name = _name(raw, "tensor name", findings)
        if len(raw) > limits.GGUF_NAME_BYTES:
            findings.error("GGUF013", f"the name has {len(raw)} bytes, more than {limits.GGUF_NAME_BYTES}", name)
        if not name:
            findings.warning("GGUF035", "a tensor's name is empty")
        if name in seen:
            findings.error("GGUF014", "the name occurs twice", name)
        seen.add(name)
        rank = cursor.u32("a tensor's entry")
        if rank < len(shapes):
            dims = cursor.take(shapes[rank], "a tensor's shape")
        else:
            findings.error("GGUF015", f"{rank} dimensions, more than {limits.GGUF_DIMENSIONS}", name)
            cursor.room(rank, 8 if cursor.wide else 4, "dimensions", 1024)
            dims = cursor.take(Struct(f"{cursor.order}{rank}{letter}"), "a tensor's shape")
        type_id, offset = cursor.take(place, "a tensor's place")
        info = TensorInfo(name, dims[::-1], type_id, offset)
        # 2^59 weights can have 2^62 bytes, the addressable maximum; a zero dimension must not hide an overflow of the
        # others
        if math.prod(d or 1 for d in dims) >= 1 << 59:
            findings.error("GGUF016", "the size overflows 64 bits", name)
        elif 0 in dims and math.prod(d or 1 for d in dims) > limits.EMPTY_EXTENT:
            findings.error("GGUF016", f"shape {list(info.shape)} of an empty tensor is too large", name)
        elif 0 in dims:
            findings.warning("GGUF031", f"shape {list(info.shape)} is empty", name)
        tensors.append(info)
    return tensors
