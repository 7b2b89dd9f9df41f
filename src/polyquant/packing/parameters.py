"""Parameters of a Modelfile: names and types as the Options of ollama/api/types.go (FormatParams) declare them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from polyquant.errors import PlanError, UnknownNameError, printable

__all__ = ["KINDS", "parameters", "setting"]

KINDS: dict[str, type] = {
    **dict.fromkeys(
        ("num_keep", "seed", "num_predict", "top_k", "repeat_last_n", "num_ctx", "num_batch", "num_gpu", "main_gpu",
         "num_thread", "draft_num_predict"), int,
    ),
    **dict.fromkeys(
        ("top_p", "min_p", "typical_p", "temperature", "repeat_penalty", "presence_penalty", "frequency_penalty"), float
    ),
    "use_mmap": bool,
    "stop": list,
}  # fmt: skip
"""Name -> type of the value; `stop` may be given several times."""
_SHOWN = {int: "an integer", float: "a number", bool: "true or false"}
_BOOLS = {**dict.fromkeys(("1", "t", "T", "TRUE", "true", "True"), True),
          **dict.fromkeys(("0", "f", "F", "FALSE", "false", "False"), False)}  # fmt: skip
_DEPRECATED = ("penalize_newline", "low_vram", "f16_kv", "logits_all", "vocab_only", "use_mlock", "mirostat",
               "mirostat_tau", "mirostat_eta")  # fmt: skip


def setting(text: str) -> tuple[str, str]:
    """Split KEY=VALUE. Raises PlanError."""
    key, sign, value = text.partition("=")
    if not (key and sign and value):
        raise PlanError(f"expected KEY=VALUE, got '{printable(text, 80)}'", hint="for example num_ctx=8192")
    return key, value


def parameters(given: Iterable[tuple[str, str]]) -> tuple[dict[str, Any], list[str]]:
    """Parse (name, text) pairs: values sorted by name, and notes about parameters that Ollama ignores.

    Raises UnknownNameError, PlanError for a value of the wrong type.
    """
    out: dict[str, Any] = {}
    notes = []
    for key, text in given:
        if key in _DEPRECATED:
            notes.append(f"parameter {key} is left out: Ollama does not use it any more")
            continue
        if key not in KINDS:
            raise UnknownNameError("parameter", key, KINDS)
        value = _parsed(key, text, KINDS[key])
        out[key] = [*out.get(key, []), value] if KINDS[key] is list else value
    return dict(sorted(out.items())), notes


def _parsed(key: str, text: str, kind: type) -> Any:
    try:
        if kind is bool:
            return _BOOLS[text]
        if kind is int:
            number = int(text)
            if not -(1 << 63) <= number < 1 << 63 or "_" in text or text != text.strip():
                raise ValueError
            return number
        if kind is float:
            value = np.float32(text)
            if not math.isfinite(value) or "_" in text:
                raise ValueError
            return float(str(value))  # the shortest decimal of the 32-bit float, as Go writes it
    except (ValueError, KeyError, OverflowError):
        raise PlanError(f"the parameter {key} is not valid", expected=_SHOWN[kind], found=printable(text, 40)) from None
    return text
