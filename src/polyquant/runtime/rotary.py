"""Rotary positions of a model: the frequencies after scaling, and the angles of a run of positions.

linear: every frequency divided by `factor`. llama3: long wavelengths divided, see architectures/rope.py. yarn (Peng et al. 2023): a ramp
between the two by how often a pair turns within the original context, and an amplitude 0.1 ln(factor) + 1 on cos and sin.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from polyquant.architectures.hyper import Hyper
from polyquant.architectures.rope import llama3_factors
from polyquant.errors import InputError, UnsupportedError
from polyquant.types import F32

__all__ = ["Rotary", "rotary"]


@dataclass(frozen=True, slots=True, eq=False)
class Rotary:
    """frequencies float64 [R], turns in radians a position; amplitude of cos and sin; interleaved: pairs (2i, 2i + 1), else (i, i + R)."""

    frequencies: NDArray[np.float64]
    amplitude: float
    interleaved: bool

    def angles(self, start: int, tokens: int, out: tuple[F32, F32] | None = None) -> tuple[F32, F32]:
        """cos and sin [T, R] of the positions start ... start + tokens - 1. out: where they go."""
        shape = tokens, len(self.frequencies)
        cos, sin = out or (np.empty(shape, np.float32), np.empty(shape, np.float32))
        turns = np.arange(start, start + tokens, dtype=np.float64)[:, None] * self.frequencies
        np.multiply(np.cos(turns), self.amplitude, out=cos, casting="same_kind")
        np.multiply(np.sin(turns), self.amplitude, out=sin, casting="same_kind")
        return cos, sin


def rotary(hyper: Hyper, *, interleaved: bool, divisors: F32 | None = None, file: object = None) -> Rotary:
    """divisors [R]: GGUF's rope_freqs.weight. Raises InputError for parameters that cannot be right, UnsupportedError."""
    size = hyper.rotary_size
    frequencies = hyper.rope_theta ** (-np.arange(0, size, 2, dtype=np.float64) / size)  # [R]
    amplitude = 1.0
    if divisors is not None:
        if not (np.isfinite(divisors).all() and (divisors > 0).all()):
            raise InputError("rope_freqs.weight must be finite and positive", file=file)
        frequencies = frequencies / divisors
    kind = hyper.rope.get("rope_type")
    if kind == "linear":
        frequencies = frequencies / _positive(hyper, "factor", None, file)
    elif kind == "llama3":
        frequencies = frequencies / llama3_factors(hyper.rope, hyper.rope_theta, size, file=file)
    elif kind == "yarn":
        frequencies, amplitude = _yarn(hyper, frequencies, file)
    elif kind is not None:
        raise UnsupportedError(f"RoPE scaling '{kind}' is not run", file=file, hint="known: linear, llama3, yarn")
    return Rotary(frequencies, amplitude, interleaved)


def _positive(hyper: Hyper, key: str, default: float | None, file: object) -> float:
    """A parameter of the scaling. Raises InputError if it is missing without a default, or no positive finite number."""
    value = hyper.rope.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise InputError(f"RoPE {key} cannot be right", file=file, expected="a positive number", found=value)
    return float(value)


def _yarn(hyper: Hyper, frequencies: NDArray[np.float64], file: object) -> tuple[NDArray[np.float64], float]:
    rope, size = hyper.rope, hyper.rotary_size
    context = _positive(hyper, "original_max_position_embeddings", hyper.context, file)
    factor = _positive(hyper, "factor", hyper.context / context, file)
    fast, slow = _positive(hyper, "beta_fast", 32.0, file), _positive(hyper, "beta_slow", 1.0, file)
    if hyper.rope_theta <= 1:
        raise InputError("yarn needs a rope_theta above 1", file=file, found=hyper.rope_theta)

    def pair_that_turns(times: float) -> float:
        return size * math.log(context / (times * 2 * math.pi)) / (2 * math.log(hyper.rope_theta))

    low, high = pair_that_turns(fast), pair_that_turns(slow)
    if rope.get("truncate") is not False:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    ramp = np.clip(
        (np.arange(size // 2) - low) / max(high - low, 0.001), 0, 1
    )  # 0: turns often, is kept; 1: is stretched
    return frequencies / factor * ramp + frequencies * (1 - ramp), _yarn_amplitude(hyper, factor, file)


def _yarn_amplitude(hyper: Hyper, factor: float, file: object) -> float:
    """attention_factor, or the quotient of DeepSeek's mscale and mscale_all_dim, or the paper's 0.1 ln(factor) + 1."""
    if hyper.rope.get("attention_factor") is not None:
        return _positive(hyper, "attention_factor", None, file)
    grown = 0.1 * math.log(max(factor, 1.0))
    if hyper.rope.get("mscale") and hyper.rope.get("mscale_all_dim"):
        return (_positive(hyper, "mscale", None, file) * grown + 1) / (
            _positive(hyper, "mscale_all_dim", None, file) * grown + 1
        )
    return grown + 1
