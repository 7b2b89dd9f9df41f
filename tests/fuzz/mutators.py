"""Structure-aware mutators: parse the input, change a field, write it again.

Each takes the bytes and a seeded generator. Input that does not parse is mutated as bytes.
"""

from __future__ import annotations

import json
import struct
from copy import deepcopy
from random import Random
from typing import Any

NUMBERS = (
    0,
    1,
    2,
    3,
    7,
    31,
    32,
    255,
    256,
    4096,
    *(1 << k for k in (16, 31, 32, 40, 62, 63)),
    *((1 << k) - 1 for k in (16, 31, 32, 53, 63, 64)),
)
STRINGS = ("", "a", "\0", "\n", "..", "../x", "/etc/passwd", "é▁", "\U0001f600", "x" * 70, "x" * 300, "%s{}", "\x1b[2J")
VALUES: tuple[Any, ...] = (
    None, True, False, -1, 1.5, -0.0, 1e300, 10**30, "8", [], {}, [[]], [None], [0] * 9, {"a": {}}, *NUMBERS, *STRINGS,
)  # fmt: skip
WORDS = (b"\xff" * 8, bytes(8), b"-1", b"1e9", b"null", b"[]", b"{}", b'"', b"\\", b"9" * 20, b"NaN", b"true", b"\n")
SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""GGUF's value types with a fixed size."""


def any_bytes(data: bytes, rng: Random) -> bytes:
    """One to three changes of bytes: a new value, an integer, a word, a deletion, a repetition, a cut."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(out) + 1)
        match rng.randrange(7):
            case 0:
                out[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                n = rng.choice((1, 2, 4, 8))
                out[at : at + n] = (rng.choice(NUMBERS) & (1 << 8 * n) - 1).to_bytes(n, rng.choice(("little", "big")))
            case 2:
                word = rng.choice(WORDS)
                out[at : at + rng.choice((0, len(word)))] = word
            case 3:
                del out[at : at + rng.randint(1, 40)]
            case 4:
                out[at:at] = out[max(0, at - rng.randint(1, 40)) : at]
            case 5:
                out[at:at] = bytes([rng.randrange(256)])
            case 6:
                del out[at:]
    return bytes(out)


# ---------------------------------------------------------------- JSON


def json_text(data: bytes, rng: Random) -> bytes:
    """Change one node of a JSON text, sometimes its bytes."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return any_bytes(data, rng)
    if rng.random() < 0.15:
        return any_bytes(data, rng)
    for _ in range(rng.randint(1, 2)):
        value = json_value(value, rng)
    return json.dumps(value).encode()


def json_value(value: Any, rng: Random) -> Any:
    """The value with one node changed: replaced, removed, renamed, repeated, or exchanged with another."""
    places: list[tuple[Any, Any]] = []
    stack = [value]
    while stack:
        node = stack.pop()
        keys = list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
        places.extend((node, key) for key in keys)
        stack.extend(node[key] for key in keys)
    if not places:
        return _value(rng)
    node, key = rng.choice(places)
    match rng.randrange(7):
        case 0 | 1:
            node[key] = _value(rng)
        case 2:
            node[key] = _like(node[key], rng)
        case 3:
            del node[key]
        case 4:
            other, at = rng.choice(places)
            node[key] = json.loads(json.dumps(other[at])) if len(json.dumps(other[at])) < 2000 else None
        case 5 if isinstance(node, dict):
            node[rng.choice((rng.choice(STRINGS), f"{key}x", key[:-1]))] = node.pop(key)
        case _:
            if isinstance(node, list):
                node.insert(rng.randrange(len(node) + 1), deepcopy(node[key]))
            else:
                node[rng.choice(STRINGS)] = _value(rng)
    return value


def _value(rng: Random) -> Any:
    return deepcopy(rng.choice(VALUES))


def _like(value: Any, rng: Random) -> Any:
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice((value + 1, value - 1, -value, 2 * value, value // 2, value << 32, rng.choice(NUMBERS)))
    if isinstance(value, float):
        return rng.choice((-value, 0.0, value * 1e30, value / 1e30, 1e308))
    if isinstance(value, str):
        at = rng.randrange(len(value) + 1)
        return value[:at] + rng.choice(STRINGS) + value[at + rng.randrange(3) :]
    return _value(rng)


# ---------------------------------------------------------------- safetensors


def safetensors(data: bytes, rng: Random) -> bytes:
    """Change the header's JSON, its length, or the data; the length follows the new header, nine times in ten."""
    n = int.from_bytes(data[:8], "little")
    if len(data) < 8 or n > len(data) - 8 or rng.random() < 0.1:
        return any_bytes(data, rng)
    head, body = data[8 : 8 + n], data[8 + n :]
    if rng.random() < 0.9:
        head = json_text(head.rstrip(), rng)
    else:
        body = any_bytes(body, rng) if rng.random() < 0.5 else body[: rng.randrange(len(body) + 1)]
    size = len(head) if rng.random() < 0.9 else rng.choice((len(head) + 1, len(head) - 1, *NUMBERS))
    return (size & (1 << 64) - 1).to_bytes(8, "little") + head + body


# ---------------------------------------------------------------- GGUF


class _Reader:
    """The fields of a GGUF file in order. Raises ValueError or struct.error where it does not parse."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0
        self.order = "<" if data[4:8] < b"\0\0\1\0" or data[4] else ">"

    def number(self, letter: str) -> int:
        (value,) = struct.unpack_from(self.order + letter, self.data, self.at)
        self.at += struct.calcsize(letter)
        return int(value)

    def take(self, n: int) -> bytes:
        if n > len(self.data) - self.at:
            raise ValueError(n)
        self.at += n
        return self.data[self.at - n : self.at]

    def value(self, kind: int, depth: int = 0) -> list[tuple[str, Any]]:
        """A value as fields: ("I" | "Q", number) or ("", bytes)."""
        if kind in SIZES:
            return [("", self.take(SIZES[kind]))]
        if kind == 8:
            return [("s", self.take(self.number("Q")))]
        if kind != 9 or depth > 3:
            raise ValueError(kind)
        item, count = self.number("I"), self.number("Q")
        if item in SIZES:
            return [("I", item), ("Q", count), ("", self.take(SIZES[item] * count))]
        if count > 2000:
            raise ValueError(count)
        return [("I", item), ("Q", count), *(f for _ in range(count) for f in self.value(item, depth + 1))]


def gguf(data: bytes, rng: Random) -> bytes:
    """Change, remove, repeat or exchange metadata entries and tensors of a GGUF file, or one of their fields."""
    try:
        order, version, entries, tensors, rest = parsed(data)
    except (ValueError, struct.error, IndexError):
        return any_bytes(data, rng)
    counts: list[int] = []
    for _ in range(rng.randint(1, 3)):
        group = rng.choice((entries, tensors)) or entries or tensors
        match rng.randrange(12):
            case 0:
                return any_bytes(data, rng)
            case 1:
                counts = [rng.choice(NUMBERS), rng.choice(NUMBERS)]
            case 2:
                version = rng.choice((0, 1, 2, 3, 4, rng.choice(NUMBERS) & 0xFFFFFFFF))
            case 3:
                rest = any_bytes(rest, rng) if rng.random() < 0.5 else rest[: rng.randrange(len(rest) + 1)]
            case 4 if group:
                group.pop(rng.randrange(len(group)))
            case 5 if group:
                group.insert(rng.randrange(len(group) + 1), list(rng.choice(group)))
            case 6 if len(group) > 1:
                a, b = rng.randrange(len(group)), rng.randrange(len(group))
                group[a], group[b] = group[b], group[a]
            case _ if group:
                _change(rng.choice(group), group, rng)
    n_tensors, n_keys = counts or (len(tensors), len(entries))
    head = b"GGUF" + struct.pack(order + "IQQ", version, n_tensors, n_keys)
    head += b"".join(packed(field, order) for item in (*entries, *tensors) for field in item)
    return head + bytes(-len(head) % 32) + rest


def without_tensors(data: bytes) -> bytes:
    """The metadata of a GGUF file as a separate file."""
    order, version, entries, _, _ = parsed(data)
    head = b"GGUF" + struct.pack(order + "IQQ", version, 0, len(entries))
    return head + b"".join(packed(field, order) for item in entries for field in item)


def parsed(data: bytes) -> tuple[str, int, list[Any], list[Any], bytes]:
    if data[:4] != b"GGUF":
        raise ValueError(data[:4])
    r = _Reader(data)
    r.at = 4
    version, n_tensors, n_keys = r.number("I"), r.number("Q"), r.number("Q")
    if n_tensors > 1000 or n_keys > 1000:
        raise ValueError(n_tensors)
    entries = []
    for _ in range(n_keys):
        key, kind = r.take(r.number("Q")), r.number("I")
        entries.append([("s", key), ("I", kind), *r.value(kind)])
    tensors = []
    for _ in range(n_tensors):
        name, dims = r.take(r.number("Q")), r.number("I")
        sizes = [("Q", r.number("Q")) for _ in range(min(dims, 9))]
        tensors.append([("s", name), ("I", dims), *sizes, ("I", r.number("I")), ("Q", r.number("Q"))])
    return r.order, version, entries, tensors, data[r.at + -r.at % 32 :]


def _change(item: list[tuple[str, Any]], group: list[Any], rng: Random) -> None:
    """Change one field in place: an integer, a string (its bytes, or its length alone), or raw bytes."""
    at = rng.randrange(min(len(item), rng.choice((4, 8, len(item)))))
    kind, value = item[at]
    if kind in ("I", "Q"):
        near = (value + 1, value - 1, 2 * value, value // 2, rng.choice(NUMBERS), rng.randrange(64))
        item[at] = (kind, rng.choice(near))
    elif kind == "s" and rng.random() < 0.2:
        item[at] = ("", struct.pack("<Q", rng.choice(NUMBERS)) + value)
    elif kind == "s":
        other = rng.choice(group)[0]
        item[at] = ("s", rng.choice((other[1], rng.choice(STRINGS).encode(), any_bytes(value, rng), b"\xff\xfe")))
    else:
        item[at] = ("", any_bytes(value, rng) if rng.random() < 0.3 else _same_size(value, rng))


def _same_size(value: bytes, rng: Random) -> bytes:
    if not value:
        return value
    at, n = rng.randrange(len(value)), rng.choice((1, 4, 8))
    new = rng.choice((rng.randbytes(n), bytes(n), b"\xff" * n, struct.pack("<f", float("nan")), b"\0\0\x80\x7f"))
    return (value[:at] + new + value[at + len(new) :])[: len(value)]


def packed(field: tuple[str, Any], order: str) -> bytes:
    kind, value = field
    if kind == "s":
        return struct.pack(order + "Q", len(value)) + bytes(value)
    return (
        bytes(value) if not kind else struct.pack(order + kind, value & (0xFFFFFFFF if kind == "I" else (1 << 64) - 1))
    )
