"""Rotary positions of a model: the frequencies after scaling, and the angles of a run of positions.

linear: every frequency divided by `factor`. llama3: long wavelengths divided, see models/rope.py. yarn (Peng et al. 2023): a ramp
between the two by how often a pair turns within the original context, and an amplitude 0.1 ln(factor) + 1 on cos and sin.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from polyquant.errors import UnsupportedError
from polyquant.models.config import Hyper
from polyquant.models.rope import llama3_factors
from polyquant.types import F32

__all__ = ["Rotary", "rotary"]


@dataclass(frozen=True, slots=True, eq=False)
class Rotary:
    """frequencies float64 [R], turns in radians a position; amplitude of cos and sin; interleaved: pairs (2i, 2i + 1), else (i, i + R)."""

    frequencies: NDArray[np.float64]
    amplitude: float
    interleaved: bool

    def angles(self, start: int, tokens: int) -> tuple[F32, F32]:
        """cos and sin [T, R] of the positions start ... start + tokens - 1."""
        turns = np.arange(start, start + tokens, dtype=np.float64)[:, None] * self.frequencies
        return (
            (np.cos(turns) * self.amplitude).astype(np.float32),
            (np.sin(turns) * self.amplitude).astype(np.float32),
        )


def rotary(hyper: Hyper, *, interleaved: bool, divisors: F32 | None = None, size: int | None = None) -> Rotary:
    """size: numbers of a head that turn (all of them if None). divisors [size / 2]: GGUF's rope_freqs.weight. Raises UnsupportedError."""
    size = size or hyper.head_size
    theta = hyper.rope_theta
    frequencies = theta ** (-np.arange(0, size, 2, dtype=np.float64) / size)  # [R]
    amplitude = 1.0
    kind = hyper.rope.get("rope_type")
    if divisors is not None:
        frequencies = frequencies / divisors
    elif kind == "linear":
        frequencies = frequencies / float(hyper.rope["factor"])
    elif kind == "llama3":
        frequencies = frequencies / llama3_factors(hyper.rope, theta, size)
    elif kind == "yarn":
        frequencies, amplitude = _yarn(hyper, frequencies, size)
    elif kind is not None:
        raise UnsupportedError(f"RoPE scaling '{kind}' is not run", hint="known: linear, llama3, yarn")
    return Rotary(frequencies, amplitude, interleaved)


def _yarn(hyper: Hyper, frequencies: NDArray[np.float64], size: int) -> tuple[NDArray[np.float64], float]:
    rope = hyper.rope
    factor = float(rope["factor"])
    context = float(rope.get("original_max_position_embeddings") or hyper.context)
    fast, slow = float(rope.get("beta_fast") or 32.0), float(rope.get("beta_slow") or 1.0)

    def pair_that_turns(times: float) -> float:
        return size * math.log(context / (times * 2 * math.pi)) / (2 * math.log(hyper.rope_theta))

    low, high = max(math.floor(pair_that_turns(fast)), 0), min(math.ceil(pair_that_turns(slow)), size - 1)
    ramp = np.clip((np.arange(size // 2) - low) / max(high - low, 0.001), 0, 1)
    amplitude = rope.get("attention_factor")
    return (
        frequencies / factor * ramp + frequencies * (1 - ramp),
        float(amplitude) if amplitude is not None else 0.1 * math.log(factor) + 1.0,
    )
