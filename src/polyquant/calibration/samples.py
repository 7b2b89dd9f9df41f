"""Calibration data as samples instead of one text: .json or .jsonl, of token ids (for models without a tokenizer) or of texts.

    [[1, 5, 7, ...], ...]   {"input_ids": [[1, 5, 7, ...], ...]}       .json
    [1, 5, 7, ...]   {"input_ids": [1, 5, 7]}   {"text": "..."}   {"inputs_pretokenized": "..."}       lines of .jsonl

Any other file is one text, read as it is.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polyquant.errors import InputError
from polyquant.runtime.text import read_text
from polyquant.storage import strict_json

__all__ = ["OWN_TEXT", "Sample", "check_text", "read_samples"]

OWN_TEXT = "self"
"""In place of a file: text that the model writes."""

Sample = str | Sequence[int]
_TEXTS = ("text", "inputs_pretokenized")
_FORM = 'lists of token ids, or lines such as {"text": "..."}'


def read_samples(path: str | os.PathLike[str]) -> list[Sample] | None:
    """The samples of a .json or .jsonl file; None for another file. Raises InputError."""
    suffix = Path(path).suffix.lower()
    if suffix == ".jsonl":
        lines = [line for line in read_text(path).splitlines() if line.strip()]
        return [_sample(strict_json.parse(line.encode(), file=path), path) for line in lines]
    if suffix != ".json":
        return None
    content = strict_json.parse(read_text(path).encode(), file=path)
    if isinstance(content, dict):
        content = content.get("input_ids")
    if not isinstance(content, list):
        raise InputError("no calibration samples", file=path, expected=_FORM)
    return [_sample(entry, path) for entry in content]


def _sample(entry: Any, path: object) -> Sample:
    """One sample, whatever it lies in."""
    found = entry
    if isinstance(entry, dict):
        found = next((entry[key] for key in ("input_ids", *_TEXTS) if key in entry), None)
    if isinstance(found, str):
        return found
    if not isinstance(found, list):
        raise InputError("no calibration sample", file=path, expected=_FORM, found=repr(entry)[:60])
    return strict_json.integers(found, "token ids", file=path)


def check_text(text: str | None) -> None:
    """InputError now for a calibration text that could not be read when the work gets there."""
    if text is not None and text != OWN_TEXT:
        read_text(text)
