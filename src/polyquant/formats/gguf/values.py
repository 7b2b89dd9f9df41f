"""Metadata values of a GGUF file: bytes to Python and back.

    scalar   [number, 1 to 8 bytes]      bool is one byte
    string   [length u64][UTF-8]         length u32 in version 1
    array    [item kind u32][count u64][items, no padding]   count u32 in version 1

Arrays are decoded on access: a number array is a view of the file, a string array an index of it. A nested array (items
are arrays) is a tuple of arrays: it is read but never written, because llama.cpp rejects it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from polyquant.errors import InputError, PlanError, printable
from polyquant.ops.strings import skip_strings
from polyquant.types import U8, Kind, Meta

__all__ = ["FORMATS", "ArrayValue", "NumberArray", "Order", "StringArray", "encode", "plain"]

FORMATS: dict[Kind, str] = {
    Kind.UINT8: "B",
    Kind.INT8: "b",
    Kind.UINT16: "H",
    Kind.INT16: "h",
    Kind.UINT32: "I",
    Kind.INT32: "i",
    Kind.FLOAT32: "f",
    Kind.BOOL: "?",
    Kind.UINT64: "Q",
    Kind.INT64: "q",
    Kind.FLOAT64: "d",
}
"""struct's format letters of the scalar kinds."""

_CHECKED_AT_ONCE = 1 << 16

Order: TypeAlias = Literal["<", ">"]
"""Byte order in the notation of struct and numpy."""


class NumberArray(Sequence[Any]):
    """An array of numbers or bools, as a view of the file. Items are Python numbers; `numpy()` is the view itself."""

    __slots__ = ("_raw", "kind")

    def __init__(self, kind: Kind, raw: NDArray[Any]) -> None:
        """raw [n]: dtype of the kind, any byte order; uint8 for bools."""
        self.kind, self._raw = kind, raw

    def numpy(self) -> NDArray[Any]:
        """Read-only [n] in native byte order; bools as bool."""
        return (
            self._raw != 0
            if self.kind is Kind.BOOL
            else self._raw.astype(self._raw.dtype.newbyteorder("="), copy=False)
        )

    def raw(self) -> NDArray[Any]:
        """[n] in the stored byte order."""
        return self._raw

    def tolist(self) -> list[Any]:
        """All items as Python numbers."""
        items: list[Any] = self.numpy().tolist()
        return items

    def __len__(self) -> int:
        return len(self._raw)

    def __getitem__(self, i: Any) -> Any:
        item = self._raw[i]
        if isinstance(i, slice):
            return NumberArray(self.kind, item).tolist()
        return bool(item) if self.kind is Kind.BOOL else item.item()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.tolist())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and self.tolist() == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{len(self)} x {self.kind.name.lower()}>"


class StringArray(Sequence[str]):
    """An array of strings in the file, indexed on first use and decoded on access."""

    __slots__ = ("_big", "_buffer", "_count", "_starts", "_wide", "end", "name", "start")

    def __init__(self, buffer: U8, start: int, end: int, count: int, *, big: bool, wide: bool, name: str) -> None:
        """The strings occupy buffer[start:end] (checked by the header's reader); name: the key, for messages."""
        self._buffer, self.start, self.end, self._count = buffer, start, end, count
        self._big, self._wide, self.name = big, wide, name
        self._starts: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return self._count

    def encoded(self, order: Order) -> bytes | None:
        """All items in version 3's encoding if the file already has it, to be copied at once; else None."""
        return self._buffer[self.start : self.end].tobytes() if self._wide and self._big == (order == ">") else None

    def _bounds(self) -> NDArray[np.int64]:
        """int64 [count + 1]: offset of each length field, and the end."""
        if self._starts is None:
            starts = np.empty(self._count + 1, np.int64)
            starts[-1] = self.end
            skip_strings(
                self._buffer,
                self.start,
                self._count,
                big_endian=self._big,
                wide=self._wide,
                starts=starts[: self._count],
            )
            self._starts = starts
        return self._starts

    def item_bytes(self, i: int) -> bytes:
        """The bytes of item i."""
        bounds = self._bounds()
        return self._buffer[bounds[i] + (8 if self._wide else 4) : bounds[i + 1]].tobytes()

    def raw(self) -> Iterator[bytes]:
        """The bytes of every item, in order."""
        bounds = (self._bounds() - self.start).tolist()
        blob, width = self._buffer[self.start : self.end].tobytes(), 8 if self._wide else 4
        return (blob[a + width : b] for a, b in pairwise(bounds))

    def is_text(self) -> bool:
        """True if every item is UTF-8. No Python object per item: 10 million items take about a second."""
        at, width = self.start, 8 if self._wide else 4
        for done in range(0, self._count, _CHECKED_AT_ONCE):
            starts = np.empty(min(_CHECKED_AT_ONCE, self._count - done), np.int64)
            end = skip_strings(self._buffer, at, len(starts), big_endian=self._big, wide=self._wide, starts=starts)
            text = self._buffer[at:end].copy()
            # A line feed is never part of a multi-byte character: with every length byte replaced by one, the whole
            # buffer is UTF-8 if and only if each item is.
            text[(starts - at)[:, None] + np.arange(width)] = 0x0A
            try:
                text.tobytes().decode()
            except UnicodeDecodeError:
                return False
            at = end
        return True

    def tolist(self) -> list[str]:
        """All items decoded. Raises InputError at the first that is not UTF-8."""
        try:
            return [item.decode() for item in self.raw()]
        except UnicodeDecodeError as e:
            raise _not_utf8(self.name) from e

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(self._count))]
        i = i + self._count if i < 0 else i
        if not 0 <= i < self._count:
            raise IndexError(f"{self._count} strings, none at {i}")
        try:
            return self.item_bytes(i).decode()
        except UnicodeDecodeError as e:
            raise _not_utf8(self.name) from e

    def __iter__(self) -> Iterator[str]:
        return iter(self.tolist())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and self.tolist() == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{self._count} x string>"


ArrayValue: TypeAlias = NumberArray | StringArray | tuple[Any, ...]


def _not_utf8(key: str) -> InputError:
    return InputError(
        f"the value of '{printable(key)}' is not UTF-8",
        hint="`polyquant validate` says more; `polyquant edit` can replace it",
    )


def plain(value: Any) -> Any:
    """A metadata value as numbers, strings and lists of them, all decoded (for JSON)."""
    if isinstance(value, NumberArray | StringArray):
        return value.tolist()
    return [plain(v) for v in value] if isinstance(value, list | tuple) else value


def _string(text: Any, order: Order) -> bytes:
    raw = text.encode()
    return struct.pack(f"{order}Q", len(raw)) + bytes(raw)


def _items(value: Any, item: Kind, order: Order) -> bytes:
    if isinstance(value, StringArray) and item is Kind.STRING and (done := value.encoded(order)) is not None:
        return done
    if isinstance(value, NumberArray) and value.kind is item:
        raw = value.raw()
        return raw.astype(raw.dtype.newbyteorder(order), copy=False).tobytes()
    if item is Kind.STRING:
        return b"".join(_string(text, order) for text in value)
    return struct.pack(f"{order}{len(value)}{FORMATS[item]}", *value)


def encode(key: str, meta: Meta, order: Order = "<") -> bytes:
    """[kind u32][value] of version 3.

    Raises PlanError for numbers out of range and nested arrays.
    """
    head = struct.pack(f"{order}I", meta.kind)
    try:
        if meta.kind is Kind.STRING:
            return head + _string(meta.value, order)
        if meta.kind is not Kind.ARRAY:
            return head + struct.pack(order + FORMATS[meta.kind], meta.value)
        if meta.item is None or meta.item is Kind.ARRAY:
            raise PlanError(
                f"'{printable(key)}' is an array of arrays, which llama.cpp refuses", hint="flatten it or leave it out"
            )
        return head + struct.pack(f"{order}IQ", meta.item, len(meta.value)) + _items(meta.value, meta.item, order)
    except (struct.error, OverflowError, TypeError, ValueError, AttributeError) as e:
        kind = meta.kind.name if meta.item is None else f"array of {meta.item.name}"
        raise PlanError(f"the value of '{printable(key)}' does not fit its type", expected=kind.lower(), found=e) from e
