"""Tokens by id: the vocabulary and the added tokens of a tokenizer.json, checked and laid out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyquant.errors import InputError
from polyquant.storage import strict_json
from polyquant.storage.strict_json import typed
from polyquant.tokenizers.sentencepiece import MAX_TOKENS
from polyquant.tokenizers.vocabulary import CONTROL, NORMAL, UNUSED, USER

__all__ = ["BYTE_PIECE", "Added", "Table", "lay_out", "looks_special", "read_added", "read_merges", "read_vocab"]

BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
"""A token for a single byte."""


@dataclass(frozen=True, slots=True)
class Added:
    """A token outside the vocabulary, matched in the text before all others."""

    id: int
    text: str
    special: bool


@dataclass(frozen=True, slots=True)
class Table:
    """tokens and types by id; ids: text -> id, of the kept tokens."""

    tokens: list[str]
    types: list[int]
    ids: dict[str, int]
    warnings: list[str]


def read_added(items: Any, file: Path) -> list[Added]:
    """Return the `added_tokens` of tokenizer.json. Raises InputError."""
    out = []
    for item in typed(items, list, "added_tokens", file=file):
        entry = typed(item, dict, "an added token", file=file)
        out.append(
            Added(
                strict_json.integer(entry.get("id"), "id of an added token", file=file),
                typed(entry.get("content"), str, "content of an added token", file=file),
                bool(entry.get("special")),
            )
        )
    return out


def read_vocab(vocab: Mapping[str, Any], file: Path) -> list[tuple[str, int]]:
    """Return (text, id) of every piece. Raises InputError."""
    return [(text, strict_json.integer(i, "id of a token", file=file)) for text, i in vocab.items()]


def read_merges(items: Any, file: Path) -> list[tuple[str, str]]:
    """Return merges by rank, from both spellings: "a b" and ["a", "b"]. Raises InputError."""
    out = []
    for item in typed(items, list, "merges", file=file):
        pair = item.split(" ", 1) if isinstance(item, str) else item
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(p, str) and p for p in pair):
            raise InputError("a merge is not a pair of pieces", file=file, found=item)
        out.append((pair[0], pair[1]))
    return out


def looks_special(text: str) -> bool:
    """True for tokens that llama.cpp's converter treats as control tokens although some files do not mark them."""
    return (
        text in ("<pad>", "<mask>", "<2mass>", "[@BOS@]")
        or (text.startswith("<|") and text.endswith("|>"))
        or (text.startswith("<｜") and text.endswith("｜>"))
        or (text.startswith("<unused") and text.endswith(">"))
    )


def lay_out(items: Iterable[tuple[str, int]], added: Iterable[Added], rows: int | None, file: Path) -> Table:
    """Return tokens by id, with holes filled. Raises InputError for duplicate or implausible ids."""
    items, added = list(items), list(added)
    top = max((i for i in (*(i for _, i in items), *(a.id for a in added))), default=-1) + 1
    size = rows if rows is not None else top
    if size > MAX_TOKENS:
        raise InputError("token ids are too large", file=file, expected=f"below {MAX_TOKENS}", found=size)
    tokens: list[str | None] = [None] * size
    types = [UNUSED] * size
    for text, i in items:
        if i < size:
            if tokens[i] is not None:
                raise InputError("two tokens have the same id", file=file, found=f"{i}: {tokens[i]!r} and {text!r}")
            tokens[i], types[i] = text, NORMAL
    for a in added:
        if a.id < size:
            special = a.special or looks_special(a.text)
            types[a.id] = CONTROL if special else USER
            tokens[a.id] = a.text if special else a.text.replace("▁", " ")
    warnings = []
    if top > size:
        beyond = sum(i >= size for _, i in items) + sum(a.id >= size for a in added)
        warnings.append(f"{beyond} tokens have no row in the embedding ({size} rows) and are dropped")
    full = [f"[PAD{i}]" if t is None else t for i, t in enumerate(tokens)]
    return Table(full, types, {t: i for i, t in enumerate(full)}, warnings)
