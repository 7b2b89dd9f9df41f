"""Sampling recommended by a model's files.

    folder       generation_config.json: do_sample, temperature, top_k, top_p, min_p, repetition_penalty
    GGUF file    general.sampling.temp, .top_k, .top_p, .min_p, .penalty_repeat, .penalty_last_n (llama.cpp writes them from generation_config.json)

A folder with `do_sample: false`, or without a temperature, is greedy. transformers applies its penalty to the whole text, llama.cpp to the last 64 tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from polyquant.errors import InputError
from polyquant.runtime.sampling import Sampling
from polyquant.storage import strict_json
from polyquant.types import Checkpoint

__all__ = ["WHOLE_TEXT", "Recommended", "recommended", "shown"]

WHOLE_TEXT = 1 << 31
"""A repetition window for all tokens so far."""
_FILE = "generation_config.json"
_KEYS = "general.sampling"
_GGUF_NAMES = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
    "penalty_last_n": "repetition_window",
}
_CUTS = ("temperature", "top_k", "top_p", "min_p")
_WHOLE = ("top_k", "repetition_window")


@dataclass(frozen=True, slots=True)
class Recommended:
    """Recommended values. values: fields of Sampling; origin: their file or keys; notes: about ignored values."""

    values: Mapping[str, Any] = field(default_factory=dict)
    origin: str = ""
    notes: tuple[str, ...] = ()


def recommended(checkpoint: Checkpoint) -> Recommended:
    """Return the sampling recommended by the checkpoint's files, if any. Raises InputError for a broken file."""
    if checkpoint.naming == "gguf":
        found = {
            ours: checkpoint.metadata[f"{_KEYS}.{name}"].value
            for name, ours in _GGUF_NAMES.items()
            if f"{_KEYS}.{name}" in checkpoint.metadata
        }
        return _checked(found, f"{_KEYS}.*")
    path = checkpoint.files.get(_FILE)
    if path is None:
        return Recommended()
    config = strict_json.typed(strict_json.read(path), dict, _FILE, file=path)
    found = {n: v for n in (*_CUTS, "repetition_penalty") if (v := config.get(n)) is not None}
    sample = config.get("do_sample")
    if sample is True:
        found.setdefault("temperature", 1.0)
    elif sample is False or "temperature" not in found:
        found = {n: v for n, v in found.items() if n not in _CUTS}
        if sample is False:
            found["temperature"] = 0.0
    if "repetition_penalty" in found:
        found["repetition_window"] = WHOLE_TEXT
    return _checked(found, _FILE)


def _checked(found: Mapping[str, Any], origin: str) -> Recommended:
    """Return the valid values, and a note for each invalid one."""
    values, notes = {}, []
    for name, given in found.items():
        value = int(given) if name in _WHOLE and isinstance(given, float) and given.is_integer() else given
        if value == -1 and name in _WHOLE:  # "off" for top_k, "all" for the window
            value = WHOLE_TEXT if name == "repetition_window" else 0
        try:
            Sampling(**{name: value})
        except InputError as problem:
            notes.append(f"{origin} is ignored where {problem}")
        else:
            values[name] = value
    return Recommended(values, origin if values else "", tuple(notes))


def shown(sampling: Sampling) -> str:
    """Describe the sampling: "temperature 0.6, top-p 0.9", or "greedy (temperature 0)"."""
    return ", ".join(_words(sampling))


def _words(sampling: Sampling) -> Iterator[str]:
    if sampling.temperature == 0:
        yield "greedy (temperature 0)"
    else:
        yield f"temperature {sampling.temperature:.4g}"
        if sampling.top_k:
            yield f"top-k {sampling.top_k}"
        if sampling.top_p < 1:
            yield f"top-p {sampling.top_p:.4g}"
        if sampling.min_p > 0:
            yield f"min-p {sampling.min_p:.4g}"
    if sampling.repetition_penalty != 1:
        yield f"repetition penalty {sampling.repetition_penalty:.4g}"
