"""Read a text file, and tokenize it for a model."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from polyquant.errors import InputError
from polyquant.storage.source import Source

if TYPE_CHECKING:
    from polyquant.runtime.model import Model  # reading a text loads no decoder

__all__ = ["MAX_TEXT_BYTES", "read_text", "text_tokens"]

MAX_TEXT_BYTES = 1 << 24  # 4 million tokens; the tokenizer's records for them take most of a gigabyte


def read_text(path: str | os.PathLike[str]) -> str:
    """Read a UTF-8 file. Raises InputError for more than 16 MiB, or another encoding."""
    source = Source(path)
    try:
        if source.size > MAX_TEXT_BYTES:
            raise InputError(
                "the text is too large",
                file=path,
                expected=f"at most {MAX_TEXT_BYTES} bytes",
                found=source.size,
                hint="use a part of it",
            )
        raw = bytes(source.pread(0, source.size))
    finally:
        source.close()
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise InputError(f"the text is not UTF-8 (byte {problem.start})", file=path) from None


def text_tokens(model: Model, words: str, limit: int | None) -> tuple[NDArray[np.int64], int | None]:
    """Return the ids [T] of the text, at most `limit`, and BOS if the tokenizer adds one."""
    tokenizer = model.tokenizer
    bos = tokenizer.special.get("bos")
    if tokenizer.encode("")[:1] != [bos]:
        bos = None
    ids = np.asarray(tokenizer.encode(words, add_special=False, parse_special=False)[:limit], np.int64)
    if len(ids) and ids.max() >= model.vocab:
        raise InputError(
            "the tokenizer has more tokens than the model",
            file=model.checkpoint.path,
            expected=model.vocab,
            found=int(ids.max()),
        )
    return ids, bos
