"""A cursor over a GGUF header. Every step checks the remaining bytes before it trusts a count.

The buffer has the first bytes of the file, all of them if it is local. A step past the end of a shorter buffer raises
IncompleteError; `read_header` then starts again with more.
"""

from __future__ import annotations

from struct import Struct
from typing import Any, NoReturn

from polyquant.errors import InputError, printable
from polyquant.formats.gguf.values import FORMATS, Order
from polyquant.ops.strings import skip_strings
from polyquant.storage import limits
from polyquant.storage.source import Source
from polyquant.types import U8, Kind

__all__ = ["Cursor", "HeaderError", "IncompleteError"]

_WIDTHS = {kind: Struct("<" + letter).size for kind, letter in FORMATS.items()}


class HeaderError(InputError):
    """The header cannot be read past this point. code: of the corresponding finding."""

    def __init__(self, code: str, message: str, **where: Any) -> None:
        super().__init__(message, **where)
        self.code = code


class IncompleteError(Exception):
    """The header continues after the buffer. need: bytes from the start of the file that it takes at least."""

    def __init__(self, need: int) -> None:
        super().__init__(need)
        self.need = need


class Cursor:
    """A position in the header. Every step checks the remaining bytes before it trusts a count."""

    __slots__ = ("_length", "_u32", "at", "big", "buffer", "nested", "order", "size", "source", "view", "wide")

    def __init__(self, buffer: U8, at: int, order: Order, wide: bool, source: Source) -> None:
        self.buffer, self.at, self.order, self.big, self.wide = buffer, at, order, order == ">", wide
        self.size, self.source, self.nested, self.view = source.size, source, 0, buffer.data
        self._u32, self._length = Struct(order + "I"), Struct(order + ("Q" if wide else "I"))

    def fail(self, code: str, message: str, **detail: Any) -> NoReturn:
        """Raise HeaderError: nothing after this position can be read."""
        raise HeaderError(code, message, file=self.source.path, **detail)

    def take(self, form: Struct, what: str) -> tuple[Any, ...]:
        """The next fixed-size fields."""
        if self.at + form.size > self.size:
            self.fail(
                "GGUF003",
                f"the header ends inside {what}",
                found=f"a file of {self.size} bytes",
                hint="copy the file again",
            )
        self._have(self.at + form.size)
        fields = form.unpack_from(self.view, self.at)
        self.at += form.size
        return fields

    def _have(self, need: int) -> None:
        if need > len(self.buffer):
            raise IncompleteError(need)

    def u32(self, what: str) -> int:
        """The next u32."""
        return int(self.take(self._u32, what)[0])

    def length(self, what: str) -> int:
        """The next count or length: u64, or u32 in version 1."""
        return int(self.take(self._length, what)[0])

    def room(self, count: int, least: int, what: str, most: int | None = None) -> None:
        """Reject a count of items of at least `least` bytes that exceeds the rest of the file."""
        if count * least > self.size - self.at:
            self.fail("GGUF004", f"the header claims more {what} than the file contains", found=count)
        if most is not None and count > most:
            self.fail("GGUF004", f"the header claims too many {what}", expected=f"at most {most}", found=count)
        self._have(self.at + count * least)

    def text(self, what: str, most: int) -> bytes:
        """The next length-prefixed string."""
        n = self.length(what)
        self.room(n, 1, f"bytes of {what}", most)
        raw = self.buffer[self.at : self.at + n].tobytes()
        self.at += n
        return raw

    def kind(self, key: str) -> Kind:
        """The next value type."""
        number = self.u32(f"the type of '{printable(key)}'")
        if number > Kind.FLOAT64:
            self.fail("GGUF008", f"'{printable(key)}' has an unknown value type", expected="0 to 12", found=number)
        return Kind(number)

    def array_head(self, key: str) -> tuple[Kind, int]:
        """Item kind and count of the array at this position, checked against the file size."""
        item, count = self.kind(key), self.length(f"the array '{printable(key)}'")
        least = {Kind.STRING: self._length.size, Kind.ARRAY: 4 + self._length.size}.get(item) or _WIDTHS[item]
        self.room(count, least, f"items in '{printable(key)}'")
        return item, count

    def skip_value(self, kind: Kind, key: str, depth: int = 1) -> None:
        """Skip a value."""
        if kind is Kind.STRING:
            n = self.length(f"the value of '{printable(key)}'")
            self.room(n, 1, f"bytes in '{printable(key)}'", limits.GGUF_STRING_BYTES)
            self.at += n
        elif kind is Kind.ARRAY:
            self.skip_array(key, depth)
        else:
            self.room(1, _WIDTHS[kind], f"bytes in '{printable(key)}'")
            self.at += _WIDTHS[kind]

    def skip_array(self, key: str, depth: int) -> None:
        """Skip an array; nested ones count towards a limit."""
        if depth > limits.GGUF_ARRAY_DEPTH:
            self.fail(
                "GGUF010", f"'{printable(key)}' nests arrays too deeply", expected=f"at most {limits.GGUF_ARRAY_DEPTH}"
            )
        item, count = self.array_head(key)
        if item is Kind.ARRAY:
            self.nested += count
            if self.nested > limits.GGUF_NESTED_ARRAYS:
                self.fail(
                    "GGUF010",
                    f"'{printable(key)}' contains too many arrays",
                    expected=f"at most {limits.GGUF_NESTED_ARRAYS}",
                )
            for _ in range(count):
                self.skip_value(Kind.ARRAY, key, depth + 1)
        elif item is Kind.STRING:
            end = skip_strings(self.buffer, self.at, count, big_endian=self.big, wide=self.wide)
            if end < 0:
                self._have(min(self.size, len(self.buffer) + 1))
                self.fail(
                    "GGUF004",
                    f"a string in '{printable(key)}' runs past the end of the file",
                    hint="copy the file again",
                )
            self.at = end
        else:
            self.at += count * _WIDTHS[item]
