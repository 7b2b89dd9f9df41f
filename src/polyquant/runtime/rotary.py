"""Rotary positions of a model: the frequencies after scaling, and the angles of a run of positions.

A model may have two: layers with a window rotate by a base of their own where Hyper's rope_theta_swa says one, without scaling.

linear: every frequency divided by `factor`. llama3: long wavelengths divided, see architectures/rope.py. yarn (Peng et al. 2023): a ramp
between the two by how often a pair turns within the original context, and an amplitude 0.1 ln(factor) + 1 on cos and sin. longrope (Ding et al. 2024): a
divisor for each frequency, others for texts longer than the original context, and an amplitude sqrt(1 + ln(factor) / ln(original)). As in transformers, the
length of the text decides, so a text that grows past the original context is computed anew (Session). proportional (Gemma 4): the first pairs of a head
turn as they would if all did, the others stay.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyquant.architectures.hyper import Hyper
from polyquant.architectures.rope import llama3_factors, longrope_factor, proportional_pairs
from polyquant.errors import InputError, UnsupportedError
from polyquant.ops.decoder import rotate
from polyquant.types import F32

__all__ = ["Rotary", "Turns", "angles", "rotaries", "rotary"]


@dataclass(frozen=True, slots=True, eq=False)
class Turns:
    """cos, sin [T, R] of the positions of T tokens; called with heads [T, H, D] it turns them."""

    cos: F32
    sin: F32
    interleaved: bool

    def __call__(self, x: F32) -> F32:
        """[T, H, D] -> the same."""
        return rotate(x, self.cos, self.sin, interleaved=self.interleaved)


@dataclass(frozen=True, slots=True, eq=False)
class Rotary:
    """frequencies float64 [R], turns in radians a position; amplitude of cos and sin; interleaved: pairs (2i, 2i + 1), else (i, i + R). long: what texts of
    more than `reach` positions take instead. growth, floor: the amplitude of position p is multiplied with 1 + growth ln(1 + floor((p + 1) / floor))."""

    frequencies: NDArray[np.float64]
    amplitude: float
    interleaved: bool
    long: Rotary | None = None
    reach: int = 0
    growth: float = 0.0
    floor: int = 1

    def of(self, length: int) -> Rotary:
        """What a text of that length takes."""
        return self.long if self.long is not None and length > self.reach else self

    def angles(self, start: int, tokens: int, out: tuple[F32, F32] | None = None) -> tuple[F32, F32]:
        """cos and sin [T, R] of the positions start ... start + tokens - 1. out: where they go."""
        shape = tokens, len(self.frequencies)
        cos, sin = out or (np.empty(shape, np.float32), np.empty(shape, np.float32))
        positions = np.arange(start, start + tokens, dtype=np.float64)[:, None]
        turns = positions * self.frequencies
        amplitude = self.amplitude * (1 + self.growth * np.log1p((positions + 1) // self.floor))
        np.multiply(np.cos(turns), amplitude, out=cos, casting="same_kind")
        np.multiply(np.sin(turns), amplitude, out=sin, casting="same_kind")
        return cos, sin


def angles(
    found: Sequence[Rotary], start: int, tokens: int, length: int, out: Sequence[Turns] | None = None
) -> tuple[Turns, ...]:
    """The turns of positions start ... of each, in a text of that length. out: where they go."""
    turns = []
    for i, one in enumerate(found):
        cos, sin = one.of(length).angles(start, tokens, None if out is None else (out[i].cos, out[i].sin))
        turns.append(Turns(cos, sin, one.interleaved))
    return tuple(turns)


def rotaries(
    hyper: Hyper, *, interleaved: bool, divisors: F32 | None = None, file: object = None
) -> tuple[Rotary, ...]:
    """The rotation of the layers, and where they have one of their own that of layers with a window, or what queries of layers without positions are
    multiplied with (Llama 4): a rotation that does not turn. Raises InputError, UnsupportedError."""
    first = rotary(hyper, interleaved=interleaved, divisors=divisors, file=file)
    theta = hyper.real("rope_theta_swa", 0.0)
    if growth := hyper.real("temperature", 0.0):
        still = np.zeros(hyper.head_size // 2)
        return first, Rotary(still, 1.0, interleaved, growth=growth, floor=max(1, hyper.count("temperature_floor")))
    if not theta:
        return (first,)
    size = hyper.count("head_dim_swa")
    local = replace(hyper, head_dim=size, rotated=0) if size else hyper
    return first, rotary(replace(local, rope_theta=theta, rope={}), interleaved=interleaved, file=file)


def rotary(hyper: Hyper, *, interleaved: bool, divisors: F32 | None = None, file: object = None) -> Rotary:
    """divisors [R]: GGUF's rope_freqs.weight. Raises InputError for parameters that cannot be right, UnsupportedError."""
    size = hyper.rotary_size
    frequencies = hyper.rope_theta ** (-np.arange(0, size, 2, dtype=np.float64) / size)  # [R]
    amplitude = 1.0
    if divisors is not None:
        frequencies = frequencies / _sound(divisors, "rope_freqs.weight", file)
    kind = hyper.rope.get("rope_type")
    if kind == "linear":
        frequencies = frequencies / _positive(hyper, "factor", None, file)
    elif kind == "llama3":
        frequencies = frequencies / llama3_factors(hyper.rope, hyper.rope_theta, size, file=file)
    elif kind == "yarn":
        frequencies, amplitude = _yarn(hyper, frequencies, file)
    elif kind == "proportional":
        turning = proportional_pairs(hyper.rope, hyper.head_size)
        frequencies = np.where(np.arange(len(frequencies)) < turning, frequencies, 0.0) / _positive(
            hyper, "factor", 1.0, file
        )
    elif kind == "longrope":
        return _longrope(hyper, frequencies, file, interleaved=interleaved)
    elif kind not in (None, "dynamic"):  # dynamic: stretched for texts longer than the context, of which there are none
        raise UnsupportedError(
            f"RoPE scaling '{kind}' is not run",
            file=file,
            hint="known: linear, dynamic, llama3, yarn, longrope, proportional",
        )
    return Rotary(frequencies, amplitude, interleaved)


def _sound(divisors: Any, what: str, file: object) -> NDArray[np.float64]:
    """Raises InputError."""
    found = np.asarray(divisors, np.float64) if isinstance(divisors, list | tuple | np.ndarray) else np.zeros(1)
    if not (np.isfinite(found).all() and (found > 0).all()):
        raise InputError(f"{what} must be finite and positive", file=file)
    return found


def _longrope(hyper: Hyper, frequencies: NDArray[np.float64], file: object, *, interleaved: bool) -> Rotary:
    pair = []
    for key in ("short_factor", "long_factor"):
        found = _sound(hyper.rope.get(key), f"RoPE {key}", file)
        if found.shape != frequencies.shape:
            raise InputError(f"RoPE {key} cannot be right", file=file, expected=len(frequencies), found=len(found))
        pair.append(frequencies / found)
    original = int(_positive(hyper, "original_max_position_embeddings", hyper.context, file))
    amplitude = longrope_factor(hyper.rope, hyper.context)
    return Rotary(pair[0], amplitude, interleaved, Rotary(pair[1], amplitude, interleaved), original)


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
