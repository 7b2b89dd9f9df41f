"""Untrusted JSON: limits are checked on the bytes before they are parsed.

| refused | why |
|---|---|
| more bytes than the limit for its kind | memory |
| nesting deeper than 64 | recursion |
| more values than the limit for its kind | one byte of JSON can take a hundred bytes of memory |
| integers of more than 20 digits (40 in files without byte counts) | quadratic time; 64-bit integers have at most 20 |
| NaN, Infinity, 1e999 | not JSON numbers |
| duplicate keys | readers disagree on which one counts |
| lone surrogates, invalid UTF-8 | not valid text; cannot be written back |
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np

from polyquant.errors import InputError, printable
from polyquant.no_collection import no_collection
from polyquant.storage.parsed import recall, remember
from polyquant.storage.source import Source

__all__ = [
    "HEADER",
    "INDEX",
    "OTHER",
    "TOKENIZER",
    "Limit",
    "check_values",
    "integer",
    "integers",
    "parse",
    "read",
    "typed",
]

MAX_DEPTH = 64
_CHUNK = 1 << 20
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Limit:
    """Limits for one kind of JSON file: bytes, values (members, elements), and digits of an integer."""

    nbytes: int
    values: int
    digits: int = 20


# 77,000 tensors of 8 values each. safetensors itself stops at 100 MB, but parsing that much costs 400 MB and seconds.
HEADER = Limit(16_000_000, 620_000)
INDEX = Limit(64_000_000, 2_000_000)
# Vocabularies of 262,000 tokens with their merges take 34 MB and 2.5 million values.
TOKENIZER = Limit(64_000_000, 4_000_000)
# transformers writes model_max_length = int(1e30), 31 digits, into tokenizer_config.json.
OTHER = Limit(16_000_000, 1_000_000, digits=40)


def read(path: Path, limit: Limit = OTHER, *, once: bool = False) -> Any:
    """Read and parse a JSON file. once: share the value within `parsed_once`. Raises InputError."""
    source = Source(path)
    try:
        if once and (known := recall(source)) is not None:
            return known
        if source.size > limit.nbytes:
            raise InputError("JSON file is too large", file=path, expected=f"at most {limit.nbytes}", found=source.size)
        value = parse(source.pread(0, source.size), limit, file=path)
        if once:
            remember(source, value)
        return value
    finally:
        source.close()


def parse(data: Any, limit: Limit = OTHER, *, file: object = None) -> Any:
    """Parse `data` (bytes-like). Raises InputError with a one-line message."""
    raw = np.frombuffer(data, np.uint8)
    if len(raw) > limit.nbytes:
        raise InputError("JSON is too large", file=file, expected=f"at most {limit.nbytes} bytes", found=len(raw))
    _measure(raw, limit, file)
    try:
        text = str(raw.data, "utf-8")
    except UnicodeDecodeError as e:
        raise InputError(f"JSON is not UTF-8 (byte {e.start})", file=file) from None
    hooks = _Hooks(limit.digits, file)
    try:
        with no_collection():
            value = json.loads(
                text,
                object_pairs_hook=hooks.members,
                parse_int=hooks.integer,
                parse_float=hooks.number,
                parse_constant=hooks.constant,
            )
    except json.JSONDecodeError as e:
        raise InputError(f"not valid JSON: {e.msg} (character {e.pos})", file=file) from None
    if "\\ud" in text or "\\uD" in text:
        _refuse_surrogates(value, file)
    return value


def check_values(data: bytes, limit: Limit, *, file: object = None) -> None:
    """Raise InputError for more values than the limit. Much faster than `parse` for almost all files."""
    brackets, commas = _counts(data)
    if brackets + commas > limit.values:
        _measure(np.frombuffer(data, np.uint8), limit, file)


def _counts(text: bytes) -> tuple[int, int]:
    """Numbers of opening brackets and of commas, including those in strings."""
    return text.count(b"[") + text.count(b"{"), text.count(b",")


def _measure(raw: np.ndarray[Any, np.dtype[np.uint8]], limit: Limit, file: object) -> None:
    """Check nesting and number of values by counting brackets and commas outside strings, in chunks."""
    if len(raw) <= _CHUNK:
        brackets, commas = _counts(raw.tobytes())
        if brackets <= MAX_DEPTH and brackets + commas <= limit.values:
            return
    depth = values = 0
    in_string = odd_backslashes = False
    for a in range(0, len(raw), _CHUNK):
        chunk = raw[a : a + _CHUNK]
        quote, backslash = chunk == 0x22, chunk == 0x5C
        if odd_backslashes or backslash.any():
            at = np.arange(len(chunk))
            last_other = np.maximum.accumulate(np.where(backslash, -1, at))  # [chunk]: last non-backslash up to here
            run = at - last_other  # length of the run of backslashes ending here
            run[last_other == -1] += odd_backslashes
            before = np.concatenate(([odd_backslashes], run[:-1] & 1))
            quote &= before == 0
            odd_backslashes = bool(run[-1] & 1)
        inside = (np.cumsum(quote, dtype=np.int32) + in_string) & 1
        in_string = bool(inside[-1])
        outside = inside == 0
        low = chunk | 0x20  # [ and { differ in bit 5 only, ] and } too
        opens, closes = (low == 0x7B) & outside, (low == 0x7D) & outside
        level = np.cumsum(opens.view(np.int8) - closes.view(np.int8), dtype=np.int32)
        if depth + int(level.max()) > MAX_DEPTH:
            raise InputError("JSON is nested too deep", file=file, expected=f"at most {MAX_DEPTH} levels")
        depth += int(level[-1])
        values += int(np.count_nonzero(opens)) + int(np.count_nonzero((chunk == 0x2C) & outside))
        if values > limit.values:
            raise InputError("JSON has too many values", file=file, expected=f"at most {limit.values}")


@dataclass(frozen=True, slots=True)
class _Hooks:
    digits: int
    file: object

    def members(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(pairs)
        if len(out) != len(pairs):
            seen: set[str] = set()
            twice = next(k for k, _ in pairs if k in seen or seen.add(k))  # type: ignore[func-returns-value]
            raise InputError(f"JSON has the key '{printable(twice, 80)}' twice", file=self.file)
        return out

    def integer(self, digits: str) -> int:
        if len(digits) > self.digits + (digits[0] == "-"):
            raise InputError("JSON integer is too long", file=self.file, expected=f"at most {self.digits} digits")
        return int(digits)

    def number(self, digits: str) -> float:
        value = float(digits)
        if not math.isfinite(value):
            raise InputError("JSON number is not finite", file=self.file, found=digits[:40])
        return value

    def constant(self, word: str) -> NoReturn:
        raise InputError("JSON number is not finite", file=self.file, found=word)


def _refuse_surrogates(value: Any, file: object) -> None:
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            stack.extend(item)
            stack.extend(item.values())
        elif isinstance(item, list):
            stack.extend(item)
        elif isinstance(item, str) and any("\ud800" <= c <= "\udfff" for c in item):
            raise InputError("JSON string holds a lone surrogate", file=file)


def typed(value: Any, kind: type[T], what: str, *, file: object = None) -> T:
    """Return `value` if it is a `kind` (a bool is not an int). Raises InputError that names `what`."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise InputError(f"{what} has the wrong type", file=file, expected=_word(kind), found=_word(type(value)))
    return value


def integer(value: Any, what: str, *, low: int = 0, file: object = None) -> int:
    """Return `value` if it is an int of at least `low`. Raises InputError."""
    number = typed(value, int, what, file=file)
    if number < low:
        raise InputError(f"{what} is too small", file=file, expected=f"at least {low}", found=number)
    return number


def integers(value: Any, what: str, *, file: object = None) -> tuple[int, ...]:
    """Return a list of non-negative ints as a tuple. Raises InputError."""
    items = typed(value, list, what, file=file)
    for v in items:
        if type(v) is not int or v < 0:
            integer(v, what, file=file)
    return tuple(items)


def _word(kind: type) -> str:
    words = {dict: "object", list: "array", str: "string", int: "integer", float: "number", type(None): "null"}
    return words.get(kind, kind.__name__)
