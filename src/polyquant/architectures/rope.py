"""Scaled RoPE: conversion between config.json and GGUF metadata, and the frequency divisors of llama3, which GGUF
stores as a tensor.

linear, yarn: keys `{arch}.rope.scaling.*`. longrope: two tensors (rope_tensors.py) and a key. llama3:
`rope_freqs.weight`, float32 [head / 2], the divisor of each frequency: 1 for short wavelengths, `factor` for long ones,
and in between a blend linear in context / wavelength.

transformers before 5 writes `rope_theta` and `rope_scaling`, from 5 on `rope_parameters`. Both are read and written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from polyquant.architectures.hyper import Hyper, bounded_integer, real_number
from polyquant.errors import InputError
from polyquant.gguf_values import f32, string, u32
from polyquant.ops import exact
from polyquant.types import F32, Meta

__all__ = [
    "FREQS",
    "llama3_factors",
    "longrope_factor",
    "of_config",
    "of_metadata",
    "parameters",
    "proportional_pairs",
    "recognise_llama3",
    "rotated",
    "scaling_metadata",
    "share",
    "shortest",
]

FREQS = "rope_freqs.weight"
_WITHOUT_KEY = ("mscale", "mscale_all_dim", "truncate")


def parameters(config: Mapping[str, Any], file: object) -> Mapping[str, Any]:
    """Return the config.json object that describes RoPE, {} if there is none. Raises InputError."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise InputError("rope_parameters is not an object", file=file, found=rope)
    full = rope.get("full_attention")
    return full if isinstance(full, Mapping) else rope


def of_config(config: Mapping[str, Any], rope: Mapping[str, Any], file: object) -> dict[str, Any]:
    """Return Hyper.rope of a config.json whose `parameters` are `rope`. Raises InputError."""
    kind = rope.get("rope_type", rope.get("type")) or "default"
    if not isinstance(kind, str):
        raise InputError("rope_type is not a string", file=file, found=kind)
    if kind == "default":
        return {}
    kind = "longrope" if "long_factor" in rope else kind  # early models call it su or yarn
    scaled = {k: v for k, v in rope.items() if k not in ("rope_theta", "type", "rope_type")}
    # The context before scaling is in the object, at the top level, or absent; then the trained context applies.
    original = config.get("original_max_position_embeddings", config.get("max_position_embeddings"))
    if kind == "longrope" and config.get("original_max_position_embeddings") is not None:
        scaled["original_max_position_embeddings"] = original  # the top level takes precedence
    if (
        kind in ("yarn", "llama3", "longrope")
        and "original_max_position_embeddings" not in scaled
        and original is not None
    ):
        scaled["original_max_position_embeddings"] = original
    for key, value in scaled.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            real_number(value, key, file=file)
    return {"rope_type": kind, **scaled}


def of_metadata(
    get: Callable[[str], Any], *, known: Mapping[str, Any] | None = None, log: float = 0.0
) -> dict[str, Any]:
    """Return Hyper.rope of a GGUF file.

    get: returns the value of a key after the architecture's name, None if absent. known, log: as in `scaling_metadata`.
    """
    scaling = get("rope.scaling.type") or "linear"  # the default of files older than the key
    factor = shortest(get("rope.scaling.factor") or get("rope.scale_linear"))
    if scaling not in ("linear", "yarn") or factor is None or factor == 1.0:
        return {}
    rope = {"rope_type": scaling, "factor": factor}
    if scaling == "yarn":
        more = {
            "original_max_position_embeddings": get("rope.scaling.original_context_length"),
            "extrapolation_factor": shortest(get("rope.scaling.yarn_ext_factor")),
            "attention_factor": shortest(get("rope.scaling.yarn_attn_factor")),
            "beta_fast": shortest(get("rope.scaling.yarn_beta_fast")),
            "beta_slow": shortest(get("rope.scaling.yarn_beta_slow")),
        }
        rope |= {k: v for k, v in more.items() if v is not None}
        if log and (product := get("rope.scaling.yarn_log_multiplier")) is not None:
            mscale = real_number(product, "rope.scaling.yarn_log_multiplier", file=None) / log
            rope |= dict.fromkeys(("mscale", "mscale_all_dim"), float(f"{mscale:.6g}"))  # stored as float32
        rope |= known or {}
    return rope


def rotated(value: Any, head: int, file: object, *, counted: bool) -> int:
    """Return the rotary dimensions of a head of size `head`, given as a count (GGUF) or as a fraction.

    Raises InputError.
    """
    if counted:
        count = bounded_integer(value, "rope.dimension_count", head, file=file)
    else:
        share = real_number(value, "partial_rotary_factor", file=file)
        count = bounded_integer(int(head * share), "partial_rotary_factor times head_dim", head, file=file)
    if count % 2:
        raise InputError("the number of rotary dimensions is odd", file=file, found=count)
    return count


def share(count: int, head: int) -> float:
    """Return the partial_rotary_factor for `count` of `head` dimensions; transformers rounds their product down."""
    fraction = count / head
    while int(head * fraction) < count:
        fraction = math.nextafter(fraction, 2.0)
    return fraction


def shortest(value: Any) -> Any:
    """Return a float32 as the shortest decimal that round-trips: 1e-05, not 9.999999747378752e-06."""
    if isinstance(value, float) and math.isfinite(value):
        with np.errstate(over="ignore"):
            single = np.float32(value)
        return float(str(single)) if float(single) == value else value
    return value


def scaling_metadata(
    hyper: Hyper, *, known: Mapping[str, Any] | None = None, log: float = 0.0
) -> tuple[dict[str, Meta], str | None]:
    """Return (keys after `{arch}.`, warning) for the scaling of `hyper`.

    known, log: `yarn` and `yarn_log` of the architecture's table. Raises InputError.
    """
    rope = hyper.rope
    kind = rope.get("rope_type")
    if kind in (None, "llama3", "proportional"):
        return {}, None
    if kind == "longrope":
        return {"rope.scaling.attn_factor": f32(longrope_factor(rope, hyper.context))}, None
    if kind not in ("linear", "yarn") or not _number(rope.get("factor")):
        return {}, f"RoPE scaling '{kind}' has no counterpart in GGUF: long contexts will run unscaled"
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
        both = rope.get("mscale_all_dim")
        if log and isinstance(both, int | float):
            out["rope.scaling.yarn_log_multiplier"] = f32(log * float(both))
        stored = {"mscale", "mscale_all_dim"} if log and rope.get("mscale") == both else set[str]()
        stored |= {key for key, value in (known or {}).items() if rope.get(key) == value}
        if lost := [key for key in _WITHOUT_KEY if key in rope and key not in stored]:
            return (
                out,
                f"GGUF has no key for {', '.join(lost)} of this yarn scaling: long contexts will differ a little",
            )
    return out, None


def longrope_factor(rope: Mapping[str, Any], context: int) -> float:
    """Return the factor of cos and sin of a longrope scaling: attention_factor, or sqrt(1 + ln(factor) / ln(original)).

    Raises InputError.
    """
    attention, factor = rope.get("attention_factor"), rope.get("factor")
    original = rope.get("original_max_position_embeddings", context)
    if not _number(original) or original <= 1:
        raise InputError(
            "original_max_position_embeddings cannot be right", expected="a context length", found=original
        )
    if isinstance(attention, int | float) and _number(attention):
        return float(attention)
    scale = float(factor) if isinstance(factor, int | float) and _number(factor) else context / original
    logs = exact.log(np.array([scale, original], np.float64))  # the C library's last bit depends on the processor
    return math.sqrt(1 + float(logs[0] / logs[1])) if scale > 1 else 1.0


def proportional_pairs(rope: Mapping[str, Any], head: int) -> int:
    """Return the rotating pairs of a head in a proportional scaling. Raises InputError."""
    return int(real_number(rope.get("partial_rotary_factor", 1.0), "partial_rotary_factor", file=None) * head // 2)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def llama3_factors(rope: Mapping[str, Any], theta: float, head: int, *, file: object = None) -> F32:
    """Return the frequency divisors [head / 2] of a llama3 scaling.

    Raises InputError if its parameters are inconsistent.
    """
    factor, low, high = (
        rope.get(k, d) for k, d in (("factor", 8.0), ("low_freq_factor", 1.0), ("high_freq_factor", 4.0))
    )
    context = rope.get("original_max_position_embeddings", 8192)
    if not all(_number(x) and x > 0 for x in (factor, low, high, context)) or low >= high or theta <= 0:
        raise InputError(
            "llama3 RoPE parameters cannot be right", file=file, expected="0 < low < high", found=dict(rope)
        )
    # In float32 throughout and in this order, to match the reference converter: PyTorch computes number / tensor as
    # number * (1 / tensor). Powers are rounded from float64, because float32 powers differ in the last bit between
    # processors.
    one, exponents = np.float32(1), np.arange(0, head, 2, dtype=np.float32) / np.float32(head)
    powers = (np.float64(np.float32(theta)) ** exponents.astype(np.float64)).astype(np.float32)  # [head / 2]
    wavelengths = np.float32(2 * math.pi) * (one / (one / powers))
    turns = np.float32(context) * (one / wavelengths)  # rotations within the original context
    blend = np.clip((turns - np.float32(low)) / np.float32(high - low), 0, one)
    mixed = one / ((one - blend) / np.float32(factor) + blend)
    return np.where(blend == 0, np.float32(factor), mixed).astype(np.float32)


def recognise_llama3(factors: F32, theta: float, context: int) -> dict[str, Any] | None:
    """Return the llama3 parameters that produce these divisors [head / 2], None if there are none."""
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
    """Return the context implied by a divisor between 1 and `factor`, assuming low_freq_factor 1 and high_freq_factor
    4."""
    for i, divisor in enumerate(factors):
        if 1.001 < divisor < 0.999 * factor:
            turns = 1 + 3 * (1 / float(divisor) - 1 / factor) / (1 - 1 / factor)
            context = turns * 2 * math.pi * theta ** (i / len(factors))
            return (round(context),) if 1 <= context < 1 << 32 else ()
    return ()
