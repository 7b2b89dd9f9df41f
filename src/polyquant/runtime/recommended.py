"""Sampling parameters recommended by a model's files (architectures.sampling_defaults), as options of `Sampling`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from polyquant.architectures import sampling_defaults
from polyquant.errors import InputError
from polyquant.runtime.sampling import Sampling
from polyquant.types import Checkpoint

__all__ = ["ALL_TOKENS", "Recommended", "recommended", "shown"]

ALL_TOKENS = 1 << 31
"""A repetition window for all tokens so far."""
_INTEGERS = ("top_k", "repetition_window")


@dataclass(frozen=True, slots=True)
class Recommended:
    """Recommended values. values: fields of Sampling; origin: their file or keys; notes: about ignored values."""

    values: Mapping[str, Any] = field(default_factory=dict)
    origin: str = ""
    notes: tuple[str, ...] = ()


def recommended(checkpoint: Checkpoint) -> Recommended:
    """Return the sampling recommended by the checkpoint's files, if any. Raises InputError for a broken file."""
    if checkpoint.naming == "gguf":
        names = {**sampling_defaults.GGUF_NAMES, "repetition_window": sampling_defaults.WINDOW}
        keys = {name: f"{sampling_defaults.KEYS}.{short}" for name, short in names.items()}
        metadata = checkpoint.metadata
        found = {name: metadata[key] for name, key in keys.items() if key in metadata}
        return _checked(found, f"{sampling_defaults.KEYS}.*")
    found = sampling_defaults.from_folder(checkpoint.files)
    if "repetition_penalty" in found:
        found["repetition_window"] = ALL_TOKENS
    return _checked(found, sampling_defaults.FILE)


def _checked(values_in_file: Mapping[str, Any], origin: str) -> Recommended:
    """Return the valid values, and a note for each invalid one."""
    values, notes = {}, []
    for name, raw in values_in_file.items():
        value: Any = int(raw) if name in _INTEGERS and isinstance(raw, float) and raw.is_integer() else raw
        if value == -1 and name in _INTEGERS:  # "off" for top_k, "all" for the window
            value = ALL_TOKENS if name == "repetition_window" else 0
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
