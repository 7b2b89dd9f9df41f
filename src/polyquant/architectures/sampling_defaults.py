"""Sampling recommended by a model: generation_config.json <-> general.sampling.* of GGUF.

    temperature -> temp    top_k    top_p    min_p    repetition_penalty -> penalty_repeat, with penalty_last_n -1

llama.cpp's converter writes the keys since 2025. A folder with `do_sample: false`, or without a temperature, is greedy and has none.
transformers applies its penalty to the whole text, llama.cpp to the last penalty_last_n tokens (-1: all, default 64).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyquant.gguf_values import f32
from polyquant.storage import strict_json
from polyquant.types import Kind, Meta

__all__ = ["FILE", "GGUF_NAMES", "KEYS", "WINDOW", "from_folder", "to_folder", "to_gguf"]

FILE = "generation_config.json"
KEYS = "general.sampling"
GGUF_NAMES: Mapping[str, str] = {
    "temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "repetition_penalty": "penalty_repeat",
}  # fmt: skip
WINDOW = "penalty_last_n"
_CUTS = ("temperature", "top_k", "top_p", "min_p")


def from_folder(files: Mapping[str, Path]) -> dict[str, Any]:
    """Return the entries of generation_config.json that apply, unchecked. Raises InputError for a broken file."""
    path = files.get(FILE)
    if path is None:
        return {}
    config = strict_json.typed(strict_json.read(path), dict, FILE, file=path)
    found = {name: value for name in GGUF_NAMES if (value := config.get(name)) is not None}
    sample = config.get("do_sample")
    if sample is True:
        found.setdefault("temperature", 1.0)
    elif sample is False or "temperature" not in found:
        found = {name: value for name, value in found.items() if name not in _CUTS}
        if sample is False:
            found["temperature"] = 0.0
    return found


def to_gguf(files: Mapping[str, Path]) -> dict[str, Meta]:
    """Return the metadata of a folder's sampling. Values that are not numbers are left out."""
    out = {}
    for name, value in from_folder(files).items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            continue
        key = f"{KEYS}.{GGUF_NAMES[name]}"
        if name != "top_k":
            out[key] = f32(float(value))
        elif isinstance(value, int) and abs(value) < 1 << 31:
            out[key] = Meta(Kind.INT32, value)
    if f"{KEYS}.{GGUF_NAMES['repetition_penalty']}" in out:
        out[f"{KEYS}.{WINDOW}"] = Meta(Kind.INT32, -1)
    return out


def to_folder(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of generation_config.json for the metadata of a GGUF file."""
    found: dict[str, Any] = {}
    for name, short in GGUF_NAMES.items():
        if (value := _number(metadata.get(f"{KEYS}.{short}"))) is not None:
            found[name] = value
    return {"do_sample": found["temperature"] > 0, **found} if "temperature" in found else found


def _number(value: object) -> int | float | None:
    """A float32 as its shortest decimal: 0.95, not 0.949999988079071."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(f"{value:.7g}") if isinstance(value, float) else value
