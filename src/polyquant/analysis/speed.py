"""Speed and memory of a model on this machine: loading, a prompt, and token by token.

Measured in a process that does nothing else before: the peak memory is that of the whole process.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyquant.conversion.memory import peak_bytes
from polyquant.errors import InputError
from polyquant.runtime.load import load
from polyquant.runtime.model import Model
from polyquant.runtime.text import read_text, text_tokens

__all__ = ["NEW", "PROMPT", "Speed", "measure_speed"]

PROMPT, NEW = 256, 32
"""Tokens of the prompt, and tokens decoded after it."""
_REPEATS, _SECONDS = 3, 60.0
"""Repetitions; none begins later than this after the first."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Medians of `repeats` runs: tokens per second of the prompt and of decoding; seconds to load a file that the
    system has cached; peak resident memory of the process in bytes.
    """

    prompt: float
    decode: float
    load: float
    memory: int
    repeats: int

    def to_json(self) -> dict[str, Any]:
        """The values as JSON-compatible types."""
        return asdict(self)


def measure_speed(path: str | os.PathLike[str], text: str | os.PathLike[str], threads: int | None = None) -> Speed:
    """Load the model and run it on the first tokens of a UTF-8 file. Raises InputError, UnsupportedError."""
    start = perf_counter()
    model = load(path, threads=threads)
    ids, _ = text_tokens(model, read_text(text), PROMPT)
    loaded = perf_counter() - start
    if not len(ids):
        raise InputError("the text has no tokens", file=text)
    room = model.context - NEW
    if room < 1:
        raise InputError("the context is too short", file=path, expected=f"more than {NEW} tokens", found=model.context)
    prompt = np.resize(ids, min(PROMPT, room))
    prompts: list[float] = []
    decodes: list[float] = []
    until = perf_counter() + _SECONDS
    while len(prompts) < _REPEATS and (not prompts or perf_counter() < until):
        first, rest = _run(model, prompt)
        prompts.append(len(prompt) / first)
        decodes.append(NEW / rest)
    return Speed(median(prompts), median(decodes), loaded, peak_bytes(), len(prompts))


def _run(model: Model, prompt: Sequence[int] | NDArray[np.int64]) -> tuple[float, float]:
    """Seconds for the prompt, and for NEW tokens after it, each the most probable one."""
    session = model.session()
    start = perf_counter()
    logits = session.feed(prompt)
    middle = perf_counter()
    for _ in range(NEW):
        logits = session.feed([int(logits.argmax())])
    return middle - start, perf_counter() - middle
