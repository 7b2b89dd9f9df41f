"""The subset of zip that torch files use: uncompressed entries, so that a tensor is a byte range of the file.

    | local header 30 + name + extra | data | ... | central directory | (zip64 end, locator) | end, 22 + comment |

The central directory is authoritative; a local header is read only for the start of its data. Rejected: compression,
encryption, duplicate names, data outside the file or overlapping other data, bytes before the first entry.
Source: PKWARE APPNOTE 4.3.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NoReturn

from polyquant.errors import InputError
from polyquant.storage.source import Source

__all__ = ["StoredEntry", "data_offset", "read_directory"]

_END, _END64, _LOCATOR = b"PK\5\6", b"PK\6\6", b"PK\6\7"
_SENTINELS = (0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF)
_MAX_DIRECTORY = 64_000_000
_MAX_ENTRIES = 200_000


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """One file of the archive. header: offset of its local header."""

    name: str
    header: int
    nbytes: int


def read_directory(source: Source) -> Mapping[str, StoredEntry]:
    """Return name -> entry. Raises InputError."""
    count, size, offset = _end(source)
    if size > _MAX_DIRECTORY or count > _MAX_ENTRIES:
        _refuse(source, f"zip directory is too large ({count} entries, {size} bytes)")
    if 46 * count > size:
        _refuse(source, f"zip directory of {size} bytes cannot hold {count} entries")
    out: dict[str, StoredEntry] = {}
    for entry in _entries(source, source.pread(offset, size).tobytes(), count):
        if entry.name in out:
            _refuse(source, f"zip contains '{entry.name}' twice")
        out[entry.name] = entry
    at = 0
    for entry in sorted(out.values(), key=lambda e: e.header):
        if entry.header < at:
            _refuse(source, f"zip entry '{entry.name}' overlaps the one before it")
        at = entry.header + 30 + entry.nbytes
    if at > offset:
        _refuse(source, "zip entries run into the directory")
    return out


def data_offset(source: Source, entry: StoredEntry) -> int:
    """Return the offset of an entry's data. Raises InputError if the local header contradicts the directory."""
    head = source.pread(entry.header, 30).tobytes()
    name_length, extra_length = struct.unpack_from("<HH", head, 26)
    name = source.pread(entry.header + 30, name_length).tobytes()
    if head[:4] != b"PK\3\4" or name.decode("utf-8", "replace") != entry.name:
        _refuse(source, f"zip entry '{entry.name}' has a wrong local header")
    at: int = entry.header + 30 + name_length + extra_length
    if at + entry.nbytes > source.size:
        _refuse(source, f"zip entry '{entry.name}' ends after the file does")
    return at


def _end(source: Source) -> tuple[int, int, int]:
    """Return (entries, size, offset) of the central directory."""
    start = max(0, source.size - 22 - 65535)
    tail = source.pread(start, source.size - start).tobytes()
    at = tail.rfind(_END)
    if at < 0 or at + 22 > len(tail):
        _refuse(source, "zip has no end record: the file is truncated or not a torch file")
    disk, _, _, count, size, offset, comment = struct.unpack_from("<HHHHIIH", tail, at + 4)
    if disk not in (0, 0xFFFF) or at + 22 + comment != len(tail):
        _refuse(source, "zip end record is broken")
    end = start + at
    if end >= 20 and source.pread(end - 20, 4).tobytes() == _LOCATOR:
        wide = _end64(source, end)
        # Often both records exist; readers of either must see the same archive.
        if any(a not in (b, limit) for a, b, limit in zip((count, size, offset), wide, _SENTINELS, strict=False)):
            _refuse(source, "zip end records contradict each other")
        count, size, offset, end = wide
    if offset + size != end:
        _refuse(source, "zip directory is not at the offset in the end record")
    return count, size, offset


def _end64(source: Source, end: int) -> tuple[int, int, int, int]:
    at = struct.unpack_from("<Q", source.pread(end - 20, 20).tobytes(), 8)[0]
    if at + 56 > end:
        _refuse(source, "zip64 end record lies outside the file")
    record = source.pread(at, 56).tobytes()
    if record[:4] != _END64:
        _refuse(source, "zip64 end record is broken")
    _, count, size, offset = struct.unpack_from("<QQQQ", record, 24)
    return count, size, offset, at


def _entries(source: Source, directory: bytes, count: int) -> Iterator[StoredEntry]:
    at = 0
    for _ in range(count):
        if at + 46 > len(directory) or directory[at : at + 4] != b"PK\1\2":
            _refuse(source, "zip directory is broken")
        flags, method = struct.unpack_from("<HH", directory, at + 8)
        packed, size, name_length, extra_length, comment = struct.unpack_from("<IIHHH", directory, at + 20)
        header = struct.unpack_from("<I", directory, at + 42)[0]
        raw = directory[at + 46 : at + 46 + name_length]
        extra = directory[at + 46 + name_length : at + 46 + name_length + extra_length]
        name = raw.decode("utf-8", "replace")
        if method or flags & 1:
            _refuse(source, f"zip entry '{name}' is compressed or encrypted", "torch stores entries uncompressed")
        size, packed, header = _zip64(source, extra, [size, packed, header])
        if packed != size:
            _refuse(source, f"zip entry '{name}' has two sizes", f"{size} and {packed}")
        if header + 30 + name_length + size > source.size:
            _refuse(source, f"zip entry '{name}' ends after the file does")
        yield StoredEntry(name, header, size)
        at += 46 + name_length + extra_length + comment


def _zip64(source: Source, extra: bytes, fields: list[int]) -> list[int]:
    """Replace fields of 0xFFFFFFFF, in order, by the 64-bit values of extra field 1."""
    if 0xFFFFFFFF not in fields:
        return fields
    at = 0
    while at + 4 <= len(extra):
        kind, size = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            numbers = list(struct.unpack_from(f"<{min(size, len(extra) - at - 4) // 8}Q", extra, at + 4))
            if len(numbers) >= fields.count(0xFFFFFFFF):
                return [numbers.pop(0) if f == 0xFFFFFFFF else f for f in fields]
        at += 4 + size
    _refuse(source, "zip64 sizes are missing")


def _refuse(source: Source, message: str, found: str | None = None) -> NoReturn:
    raise InputError(message, file=source.path, found=found)
