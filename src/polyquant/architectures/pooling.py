"""Pooling of embedding models, read from sentence-transformers files or from a GGUF key.

modules.json                  the steps: the model, then a folder with the pooling settings
1_Pooling/config.json         pooling_mode_mean_tokens, pooling_mode_cls_token, pooling_mode_lasttoken: one is true
{architecture}.pooling_type   1 mean, 2 the first token, 3 the last
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from polyquant.architectures.hyper import Hyper
from polyquant.errors import InputError, UnsupportedError, printable
from polyquant.gguf_values import u32
from polyquant.storage import strict_json
from polyquant.storage.folder import MODULES, pooling_folder
from polyquant.types import Checkpoint, Meta

__all__ = ["KINDS", "Kind", "Pooling", "pooling_of", "to_files", "to_metadata"]

Kind: TypeAlias = Literal["mean", "cls", "last"]
KINDS: tuple[Kind, ...] = ("mean", "cls", "last")
"""In the order of GGUF's values, which start at 1."""

_KINDS = {"mean_tokens": 1, "cls_token": 2, "lasttoken": 3}
_WORDS = {"mean": 1, "cls": 2, "lasttoken": 3}
"""The newer spelling: a word under `pooling_mode`."""
_OTHERS = ("max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens")
_FOLDER = "1_Pooling"
_STEPS = ("Transformer", "Pooling", "Normalize")


@dataclass(frozen=True, slots=True)
class Pooling:
    """kind: the mean of the states of all tokens, the first or the last. normalize: whether vectors are scaled to unit
    length."""

    kind: Kind
    normalize: bool


def pooling_of(checkpoint: Checkpoint, architecture: str) -> Pooling | None:
    """Return the pooling that the files specify, None if they do not. GGUF readers always normalize.

    Raises InputError; UnsupportedError for other poolings or subsequent steps.
    """
    if checkpoint.naming == "gguf":
        number = checkpoint.metadata.get(f"{architecture}.pooling_type")
        if number in (None, 0):
            return None
        if number not in _KINDS.values():
            raise UnsupportedError(
                "unsupported pooling", file=checkpoint.path, expected="1 mean, 2 first, 3 last", found=number
            )
        return Pooling(KINDS[number - 1], normalize=True)
    modules = checkpoint.files.get(MODULES)
    if modules is None:
        return None
    steps = [str(step.get("type")).rpartition(".")[2] for step in _steps(modules)]
    others = [step for step in steps if step not in _STEPS]
    if others:
        raise UnsupportedError(f"unsupported step: {printable(others[0])}", file=modules, expected=", ".join(_STEPS))
    number = _number(checkpoint.files)
    return None if number is None else Pooling(KINDS[number - 1], normalize="Normalize" in steps)


def to_metadata(files: Mapping[str, Path], architecture: str, hyper: Hyper) -> dict[str, Meta]:
    """Return the GGUF keys. Raises InputError; UnsupportedError for a pooling without a GGUF value."""
    out = {"tokenizer.ggml.token_type_count": u32(hyper.count("token_types"))} if hyper.count("token_types") else {}
    number = _number(files)
    return out if number is None else out | {f"{architecture}.pooling_type": u32(number)}


def _steps(modules: Path) -> list[Mapping[str, Any]]:
    """Return the steps of modules.json. Raises InputError."""
    steps = strict_json.typed(strict_json.read(modules), list, MODULES, file=modules)
    if not all(isinstance(step, Mapping) for step in steps):
        raise InputError("modules.json cannot be right", file=modules, expected="a list of steps")
    return steps


def _number(files: Mapping[str, Path]) -> int | None:
    """Return GGUF's value for a folder's pooling; None without pooling settings.

    Raises InputError, UnsupportedError.
    """
    folder = pooling_folder(files[MODULES]) if MODULES in files else None
    path = files.get(f"{folder}/config.json")
    if path is None:
        return None
    settings = strict_json.typed(strict_json.read(path), dict, "the pooling", file=path)
    modes = [kind for mode, kind in _KINDS.items() if settings.get(f"pooling_mode_{mode}") is True]
    if isinstance(word := settings.get("pooling_mode"), str) and not modes:
        modes = [_WORDS[word]] if word in _WORDS else []
    if len(modes) != 1 or any(settings.get(f"pooling_mode_{mode}") is True for mode in _OTHERS):
        raise UnsupportedError(
            "GGUF has no value for this pooling", file=path, expected="only the mean, the first or the last token"
        )
    return modes[0]


def to_files(metadata: Mapping[str, Any], architecture: str, hyper: Hyper) -> dict[str, bytes]:
    """Return the files of a GGUF model, {} if it does not specify its pooling."""
    kind = metadata.get(f"{architecture}.pooling_type")
    if kind not in _KINDS.values():
        return {}
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": _FOLDER, "type": "sentence_transformers.models.Pooling"},
    ]
    settings = {
        "word_embedding_dimension": hyper.hidden,
        **{f"pooling_mode_{mode}": kind == number for mode, number in _KINDS.items()},
        **{f"pooling_mode_{mode}": False for mode in _OTHERS},
    }
    return {MODULES: _json(modules), f"{_FOLDER}/config.json": _json(settings)}


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()
