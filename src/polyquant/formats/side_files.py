"""Check the small files of a model folder: tokenizer and JSON files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from polyquant.errors import InputError
from polyquant.storage import strict_json
from polyquant.storage.folder import SIDE_FILES, entries, member
from polyquant.types import Finding, Severity

__all__ = ["check_side_files"]

_TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
)
_BIG_JSON = ("tokenizer.json", "tekken.json", "vocab.json")


def check_side_files(folder: Path, *, no_tokenizer: str, broken: str) -> Iterator[Finding]:
    """Yield findings: `no_tokenizer` if there is no tokenizer, `broken` for invalid files."""
    names = entries(folder)
    if not any(name in names for name in _TOKENIZERS):
        yield Finding(no_tokenizer, Severity.NOTE, "no tokenizer", file=folder.name)
    for name in SIDE_FILES:
        if name not in names:
            continue
        try:
            file = member(folder, name)
            if file is not None and name.endswith(".json"):
                limit = strict_json.TOKENIZER if name in _BIG_JSON else strict_json.OTHER
                strict_json.typed(strict_json.read(file, limit), dict, name)
        except InputError as e:
            bare = InputError(e.message, expected=e.expected, found=e.found, hint=e.hint)
            yield Finding(broken, Severity.ERROR, str(bare), file=name)
