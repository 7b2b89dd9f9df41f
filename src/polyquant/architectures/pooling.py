"""Embedding models: how the vectors of a text's tokens become one. The folder says it in files of sentence-transformers, GGUF in one key.

modules.json                  the steps: the model, then a folder with the settings of the pooling
1_Pooling/config.json         pooling_mode_mean_tokens, pooling_mode_cls_token, pooling_mode_lasttoken: one is true
{architecture}.pooling_type   1 mean, 2 the first token, 3 the last
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyquant.architectures.hyper import Hyper
from polyquant.errors import UnsupportedError
from polyquant.gguf_values import u32
from polyquant.storage import strict_json
from polyquant.storage.folder import MODULES, pooling_folder
from polyquant.types import Meta

__all__ = ["to_files", "to_metadata"]

_KINDS = {"mean_tokens": 1, "cls_token": 2, "lasttoken": 3}
_WORDS = {"mean": 1, "cls": 2, "lasttoken": 3}
"""The second spelling: one word under `pooling_mode`."""
_OTHERS = ("max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens")
_FOLDER = "1_Pooling"


def to_metadata(files: Mapping[str, Path], architecture: str, hyper: Hyper) -> dict[str, Meta]:
    """The keys of GGUF. Raises InputError; UnsupportedError for a pooling that GGUF has no number for."""
    out = {"tokenizer.ggml.token_type_count": u32(hyper.count("token_types"))} if hyper.count("token_types") else {}
    folder = pooling_folder(files[MODULES]) if MODULES in files else None
    path = files.get(f"{folder}/config.json")
    if path is None:
        return out
    said = strict_json.typed(strict_json.read(path), dict, "the pooling", file=path)
    modes = [kind for mode, kind in _KINDS.items() if said.get(f"pooling_mode_{mode}") is True]
    if isinstance(word := said.get("pooling_mode"), str) and not modes:
        modes = [_WORDS[word]] if word in _WORDS else []
    if len(modes) != 1 or any(said.get(f"pooling_mode_{mode}") is True for mode in _OTHERS):
        raise UnsupportedError(
            "GGUF has no number for this pooling", file=path, expected="the mean, the first or the last token alone"
        )
    return out | {f"{architecture}.pooling_type": u32(modes[0])}


def to_files(metadata: Mapping[str, Any], architecture: str, hyper: Hyper) -> dict[str, bytes]:
    """The files of a GGUF model, {} if it does not say how it is pooled."""
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
