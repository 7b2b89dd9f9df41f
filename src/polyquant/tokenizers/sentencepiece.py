"""The pieces of a SentencePiece `tokenizer.model`: a reader for the required protobuf fields.

    ModelProto   1 pieces (repeated)   2 trainer_spec   3 normalizer_spec
    piece        1 text (string)   2 score (float32)   3 type (1 normal, 2 unknown, 3 control, 4 user defined, 5 unused,
    6 byte)
    trainer      3 model_type (1 unigram, 2 BPE, 3 word, 4 char)
    normalizer   2 precompiled_charsmap (bytes)   3 add_dummy_prefix (bool, default true)
                 4 remove_extra_whitespaces (bool, default true)

Each field is a varint key (number << 3 | wire type) and a value: 0 varint, 1 eight bytes, 2 length and bytes, 5 four
bytes. `tokenizer.ggml.token_type` uses the same type numbers.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from polyquant.errors import InputError
from polyquant.storage.source import Source

__all__ = ["BPE", "MAX_TOKENS", "UNIGRAM", "Model", "parse", "read"]

UNIGRAM, BPE = 1, 2
MAX_TOKENS = 1 << 22
_MAX_FILE = 64_000_000


@dataclass(frozen=True, slots=True)
class Model:
    """pieces: (text, score, type) by id. model_type: 1 unigram, 2 BPE. add_prefix: a space is prepended. charsmap:
    character replacements. collapse_spaces: runs of spaces become one, and leading and trailing spaces are dropped."""

    pieces: tuple[tuple[str, float, int], ...]
    model_type: int
    add_prefix: bool
    charsmap: bytes = b""
    collapse_spaces: bool = True


def read(path: Path) -> Model:
    """Return the model of a file. Raises InputError."""
    source = Source(path)
    try:
        if source.size > _MAX_FILE:
            raise InputError(f"{path.name} is too large", file=path, expected=f"at most {_MAX_FILE}", found=source.size)
        return parse(bytes(source.pread(0, source.size)), file=path)
    finally:
        source.close()


def parse(data: bytes, *, file: object = None) -> Model:
    """Return the model in `data`. Raises InputError for other data."""
    pieces: list[tuple[str, float, int]] = []
    model_type, normalizer = UNIGRAM, dict[int, int | bytes]()
    for number, value in _fields(data, file):
        if number == 1 and isinstance(value, bytes):
            if len(pieces) >= MAX_TOKENS:
                raise InputError("too many pieces", file=file, expected=f"at most {MAX_TOKENS}")
            pieces.append(_piece(value, file))
        elif number == 2 and isinstance(value, bytes):
            model_type = next((v for n, v in _fields(value, file) if n == 3 and isinstance(v, int)), model_type)
        elif number == 3 and isinstance(value, bytes):
            normalizer = dict(_fields(value, file))
    if not pieces:
        raise InputError("no pieces: not a SentencePiece model", file=file)
    charsmap = normalizer.get(2, b"")
    return Model(
        tuple(pieces),
        model_type,
        add_prefix=bool(normalizer.get(3, True)),
        charsmap=charsmap if isinstance(charsmap, bytes) else b"",
        collapse_spaces=bool(normalizer.get(4, True)),
    )


def _piece(data: bytes, file: object) -> tuple[str, float, int]:
    text, score, kind = b"", 0.0, 1
    for number, value in _fields(data, file):
        if number == 1 and isinstance(value, bytes):
            text = value
        elif number == 2 and isinstance(value, bytes) and len(value) == 4:
            score = struct.unpack("<f", value)[0]
        elif number == 3 and isinstance(value, int):
            kind = value
    if not math.isfinite(score) or not 1 <= kind <= 6:
        raise InputError("a piece with an impossible score or type", file=file, found=(score, kind))
    try:
        return text.decode(), score, kind
    except UnicodeDecodeError:
        raise InputError("a piece is not UTF-8", file=file, found=text[:40]) from None


def _fields(data: bytes, file: object) -> Iterator[tuple[int, int | bytes]]:
    """Yield (field number, value) of one message; bytes for everything except varints."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at, file)
        wire = key & 7
        if wire == 0:
            value, at = _varint(data, at, file)
            yield key >> 3, value
            continue
        if wire == 2:
            size, at = _varint(data, at, file)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise InputError("not a SentencePiece model", file=file, found=f"wire type {wire} at byte {at}")
        if size > len(data) - at:
            raise InputError(
                "the SentencePiece model is cut off", file=file, expected=f"{size} bytes at {at}", found=len(data) - at
            )
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int, file: object) -> tuple[int, int]:
    value = 0
    for i in range(10):
        if at + i >= len(data):
            break
        byte = data[at + i]
        value |= (byte & 0x7F) << (7 * i)
        if byte < 0x80:
            return value, at + i + 1
    raise InputError("the SentencePiece model is cut off", file=file, expected=f"a number at byte {at}")
