"""Rotary positions of a model: scaled frequencies, and the angles of a range of positions.

A model may have two: sliding-window layers use their own base, unscaled, if Hyper has a rope_theta_swa.

linear: all frequencies divided by `factor`. llama3: long wavelengths divided, see architectures/rope.py. yarn (Peng et
al. 2023): a ramp between the two by the rotations of a pair within the original context, and an amplitude 0.1
ln(factor) + 1 of cos and sin. longrope (Ding et al. 2024): a divisor per frequency, with a second set for sequences
longer than the original context, and an amplitude sqrt(1 + ln(factor) / ln(original)). As in transformers, the sequence
length decides, so a sequence that grows past the original context is recomputed (Session). proportional (Gemma 4): the
first pairs of a head rotate at their usual frequencies, the others do not.
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
from polyquant.ops import exact
from polyquant.ops.arithmetic import cos_sin, log1p
from polyquant.ops.decoder import rotate
from polyquant.types import F32

__all__ = ["Rotary", "Rotation", "rotaries", "rotary", "rotations_at"]


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """cos, sin [T, R] of the positions of T tokens; call it to rotate heads [T, H, D]."""

    cos: F32
    sin: F32
    interleaved: bool

    def __call__(self, x: F32) -> F32:
        """Rotate [T, H, D]."""
        return rotate(x, self.cos, self.sin, interleaved=self.interleaved)


@dataclass(frozen=True, slots=True, eq=False)
class Rotary:
    """Frequencies float64 [R] in radians per position.

    amplitude: of cos and sin. interleaved: pairs (2i, 2i + 1), else (i, i + R). long: used instead for sequences of
    more than `reach` positions. growth, floor: the amplitude of position p is multiplied by 1 + growth ln(1 + floor((p
    + 1) / floor)).
    """

    frequencies: NDArray[np.float64]
    amplitude: float
    interleaved: bool
    long: Rotary | None = None
    reach: int = 0
    growth: float = 0.0
    floor: int = 1

    def of(self, length: int) -> Rotary:
        """Return the frequencies for a sequence of that length."""
        return self.long if self.long is not None and length > self.reach else self

    def angles(self, start: int, tokens: int, out: tuple[F32, F32] | None = None) -> tuple[F32, F32]:
        """Return cos and sin [T, R] of the positions start ... start + tokens - 1. out: optional output arrays."""
        shape = tokens, len(self.frequencies)
        cos, sin = out or (np.empty(shape, np.float32), np.empty(shape, np.float32))
        positions = np.arange(start, start + tokens, dtype=np.float64)[:, None]
        phases = positions * self.frequencies
        amplitude = self.amplitude * (1 + self.growth * log1p((positions + 1) // self.floor))
        for of_phases, held in zip(cos_sin(phases), (cos, sin), strict=True):
            np.multiply(of_phases, amplitude, out=held, casting="same_kind")
        return cos, sin


def rotations_at(
    frequencies: Sequence[Rotary], start: int, tokens: int, length: int, out: Sequence[Rotation] | None = None
) -> tuple[Rotation, ...]:
    """Return the rotation of positions start ... of each, for a sequence of that length. out: optional outputs."""
    rotations = []
    for i, each in enumerate(frequencies):
        cos, sin = each.of(length).angles(start, tokens, None if out is None else (out[i].cos, out[i].sin))
        rotations.append(Rotation(cos, sin, each.interleaved))
    return tuple(rotations)


def rotaries(
    hyper: Hyper, *, interleaved: bool, divisors: F32 | None = None, file: object = None
) -> tuple[Rotary, ...]:
    """Return the rotations of the model.

    The second one, if any, is that of sliding-window layers, or the position-dependent scale of queries in layers
    without RoPE (Llama 4), as a rotation by zero. Raises InputError, UnsupportedError.
    """
    first = rotary(hyper, interleaved=interleaved, divisors=divisors, file=file)
    theta = hyper.real("rope_theta_swa", 0.0)
    if growth := hyper.real("temperature", 0.0):
        zero = np.zeros(hyper.head_size // 2)
        return first, Rotary(zero, 1.0, interleaved, growth=growth, floor=max(1, hyper.count("temperature_floor")))
    if not theta:
        return (first,)
    size = hyper.count("head_dim_swa")
    local = replace(hyper, head_dim=size, rotated=0) if size else hyper
    return first, rotary(replace(local, rope_theta=theta, rope={}), interleaved=interleaved, file=file)


def rotary(hyper: Hyper, *, interleaved: bool, divisors: F32 | None = None, file: object = None) -> Rotary:
    """Return one rotation. divisors [R]: GGUF's rope_freqs.weight.

    Raises InputError for invalid parameters, UnsupportedError.
    """
    size = hyper.rotary_size
    exponents = np.arange(0, size, 2, dtype=np.float64) / size  # [R]
    frequencies = exact.exp(-exponents * exact.log(np.array(hyper.rope_theta)))
    amplitude = 1.0
    if divisors is not None:
        frequencies = frequencies / _valid_divisors(divisors, "rope_freqs.weight", file)
    kind = hyper.rope.get("rope_type")
    if kind == "linear":
        frequencies = frequencies / _positive(hyper, "factor", None, file)
    elif kind == "llama3":
        frequencies = frequencies / llama3_factors(hyper.rope, hyper.rope_theta, size, file=file)
    elif kind == "yarn":
        frequencies, amplitude = _yarn(hyper, frequencies, file)
    elif kind == "proportional":
        rotating = proportional_pairs(hyper.rope, hyper.head_size)
        frequencies = np.where(np.arange(len(frequencies)) < rotating, frequencies, 0.0) / _positive(
            hyper, "factor", 1.0, file
        )
    elif kind == "longrope":
        return _longrope(hyper, frequencies, file, interleaved=interleaved)
    elif kind not in (None, "dynamic"):  # dynamic: takes effect beyond the context only, which is never reached
        raise UnsupportedError(
            f"RoPE scaling '{kind}' is not supported",
            file=file,
            hint="known: linear, dynamic, llama3, yarn, longrope, proportional",
        )
    return Rotary(frequencies, amplitude, interleaved)


def _valid_divisors(divisors: Any, what: str, file: object) -> NDArray[np.float64]:
    """Return the divisors as an array. Raises InputError if one is not finite and positive."""
    values = np.asarray(divisors, np.float64) if isinstance(divisors, list | tuple | np.ndarray) else np.zeros(1)
    if not (np.isfinite(values).all() and (values > 0).all()):
        raise InputError(f"{what} must be finite and positive", file=file)
    return values


def _longrope(hyper: Hyper, frequencies: NDArray[np.float64], file: object, *, interleaved: bool) -> Rotary:
    pair = []
    for key in ("short_factor", "long_factor"):
        divisors = _valid_divisors(hyper.rope.get(key), f"RoPE {key}", file)
        if divisors.shape != frequencies.shape:
            raise InputError(f"RoPE {key} cannot be right", file=file, expected=len(frequencies), found=len(divisors))
        pair.append(frequencies / divisors)
    original = int(_positive(hyper, "original_max_position_embeddings", hyper.context, file))
    amplitude = longrope_factor(hyper.rope, hyper.context)
    return Rotary(pair[0], amplitude, interleaved, Rotary(pair[1], amplitude, interleaved), original)


def _positive(hyper: Hyper, key: str, default: float | None, file: object) -> float:
    """Return a parameter of the scaling.

    Raises InputError if it has no value and no default, or is not positive and finite.
    """
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

    def pair_with_rotations(rotations: float) -> float:
        return size * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(hyper.rope_theta))

    low, high = pair_with_rotations(fast), pair_with_rotations(slow)
    if rope.get("truncate") is not False:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    ramp = np.clip(
        (np.arange(size // 2) - low) / max(high - low, 0.001), 0, 1
    )  # 0: high frequency, unchanged; 1: interpolated
    return frequencies / factor * ramp + frequencies * (1 - ramp), _yarn_amplitude(hyper, factor, file)


def _yarn_amplitude(hyper: Hyper, factor: float, file: object) -> float:
    """Return attention_factor, or DeepSeek's mscale / mscale_all_dim ratio, or the paper's 0.1 ln(factor) + 1."""
    if hyper.rope.get("attention_factor") is not None:
        return _positive(hyper, "attention_factor", None, file)
    grown = 0.1 * float(exact.log(np.array(max(factor, 1.0))))
    if hyper.rope.get("mscale") and hyper.rope.get("mscale_all_dim"):
        return (_positive(hyper, "mscale", None, file) * grown + 1) / (
            _positive(hyper, "mscale_all_dim", None, file) * grown + 1
        )
    return grown + 1
