"""Scaled RoPE: what config.json says, what GGUF says, and the one kind that GGUF says as a tensor.

linear, yarn: keys `{arch}.rope.scaling.*`. llama3: `rope_freqs.weight`, float32 [head / 2], the divisor of each frequency: 1 where the
wavelength is short, `factor` where it is long, and between the two a blend that is linear in context / wavelength.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from polyquant.architectures.hyper import Hyper
from polyquant.errors import InputError
from polyquant.gguf_values import f32, string, u32
from polyquant.types import F32, Meta

__all__ = ["FREQS", "llama3_factors", "recognise_llama3", "scaling_metadata"]

FREQS = "rope_freqs.weight"
_WITHOUT_KEY = ("mscale", "mscale_all_dim", "truncate")


def scaling_metadata(hyper: Hyper) -> tuple[dict[str, Meta], str | None]:
    """(keys after `{arch}.`, warning) for the scaling of `hyper`. Raises InputError."""
    rope = hyper.rope
    kind = rope.get("rope_type")
    if kind is None or kind == "llama3":
        return {}, None
    if kind not in ("linear", "yarn") or not _number(rope.get("factor")):
        return {}, f"RoPE scaling '{kind}' has no counterpart in GGUF: long contexts will behave as if there were none"
    out = {"rope.scaling.type": string(kind), "rope.scaling.factor": f32(float(rope["factor"]))}
    if kind == "yarn":
        original = rope.get("original_max_position_embeddings", hyper.context)
        if not _number(original) or not 1 <= original < 1 << 32:
            raise InputError(
                "original_max_position_embeddings cannot be right", expected="a context length", found=original
            )
        out["rope.scaling.original_context_length"] = u32(int(original))
        keys = {
            "yarn_ext_factor": ("extrapolation_factor",),
            "yarn_attn_factor": ("attention_factor", "attn_factor"),
            "yarn_beta_fast": ("beta_fast",),
            "yarn_beta_slow": ("beta_slow",),
        }
        for key, sources in keys.items():
            value = next((rope[s] for s in sources if _number(rope.get(s))), None)
            if value is not None:
                out[f"rope.scaling.{key}"] = f32(float(value))
        if lost := [key for key in _WITHOUT_KEY if key in rope]:
            return (
                out,
                f"GGUF has no key for {', '.join(lost)} of this yarn scaling: long contexts will differ a little",
            )
    return out, None


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def llama3_factors(rope: Mapping[str, Any], theta: float, head: int, *, file: object = None) -> F32:
    """Divisors of the frequencies [head / 2] of a llama3 scaling. Raises InputError if its numbers contradict each other."""
    factor, low, high = (
        rope.get(k, d) for k, d in (("factor", 8.0), ("low_freq_factor", 1.0), ("high_freq_factor", 4.0))
    )
    context = rope.get("original_max_position_embeddings", 8192)
    if not all(_number(x) and x > 0 for x in (factor, low, high, context)) or low >= high or theta <= 0:
        raise InputError(
            "llama3 RoPE parameters cannot be right", file=file, expected="0 < low < high", found=dict(rope)
        )
    frequencies = 1.0 / theta ** (np.arange(0, head, 2, dtype=np.float64) / head)  # [head / 2]
    turns = context * frequencies / (2 * math.pi)  # [head / 2] rotations within the original context
    blend = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return np.asarray(1.0 / ((1.0 - blend) / factor + blend), np.float32)


def recognise_llama3(factors: F32, theta: float, context: int) -> dict[str, Any] | None:
    """The llama3 parameters that give these divisors [head / 2]; None if they came from elsewhere."""
    factor = float(factors[-1]) if factors.ndim == 1 and len(factors) else 0.0
    if not math.isfinite(factor) or factor <= 0:
        return None
    for original in (
        8192,
        4096,
        2048,
        16384,
        32768,
        65536,
        131072,
        context,
        *_context_of_blend(factors, factor, theta),
    ):
        rope = {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": original,
        }
        if np.allclose(llama3_factors(rope, theta, 2 * len(factors)), factors, rtol=1e-5, atol=0):
            return rope
    return None


def _context_of_blend(factors: F32, factor: float, theta: float) -> tuple[int, ...]:
    """The context that a divisor between 1 and `factor` tells, with low_freq_factor 1 and high_freq_factor 4."""
    for i, divisor in enumerate(factors):
        if 1.001 < divisor < 0.999 * factor:
            turns = 1 + 3 * (1 / float(divisor) - 1 / factor) / (1 - 1 / factor)
            context = turns * 2 * math.pi * theta ** (i / len(factors))
            return (round(context),) if 1 <= context < 1 << 32 else ()
    return ()
