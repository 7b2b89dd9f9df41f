"""Speed and memory of a model on this machine: loading, a prompt, and token by token.

The peak memory is that of the whole process, so each model is measured in a new one.
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
_REPEATS, _LEAST, _MOST = 3, 1.0, 60.0
"""Least repetitions and seconds; none begins later than the last number of seconds after the first."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Medians of `repeats` runs: tokens per second of the prompt and of decoding; seconds to load a file that the
    system has cached; peak resident memory of the process in bytes.

    spread: of the middle half of the decoding rates, divided by their median; large if other programs were running.
    """

    prompt: float
    decode: float
    load: float
    memory: int
    repeats: int
    spread: float

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
    start = perf_counter()
    while not prompts or ((spent := perf_counter() - start) < _MOST and (len(prompts) < _REPEATS or spent < _LEAST)):
        first, rest = _run(model, prompt)
        prompts.append(len(prompt) / first)
        decodes.append(NEW / rest)
    low, high = np.quantile(decodes, (0.25, 0.75))
    spread = float(high - low) / median(decodes)
    return Speed(median(prompts), median(decodes), loaded, peak_bytes(), len(prompts), spread)


def _run(model: Model, prompt: Sequence[int] | NDArray[np.int64]) -> tuple[float, float]:
    """Seconds for the prompt, and for NEW tokens after it, each the most probable one."""
    session = model.session()
    start = perf_counter()
    logits = session.feed(prompt)
    middle = perf_counter()
    for _ in range(NEW):
        logits = session.feed([int(logits.argmax())])
    return middle - start, perf_counter() - middle
