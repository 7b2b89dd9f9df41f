"""Scaled RoPE that GGUF stores as tensors, frequency divisors [rotated / 2], and the equivalent config.json entries.

llama3         rope_freqs.weight: 1 for short wavelengths, `factor` for long ones
proportional   rope_freqs.weight: 1 for pairs that rotate, 1e30 for pairs that do not (Gemma 4)
longrope       rope_factors_long.weight and rope_factors_short.weight, lists in config.json; a metadata factor of the
scores
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from polyquant.architectures import rope
from polyquant.architectures.hyper import Hyper
from polyquant.errors import InputError
from polyquant.types import F32, Checkpoint

__all__ = ["NAMES", "constants", "restored"]

_LONG, _SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
NAMES = (rope.FREQS, _LONG, _SHORT)
_FIXED = np.float32(1e30)
"""The divisor of a pair that does not rotate."""


def constants(hyper: Hyper, file: object) -> dict[str, F32]:
    """Return the tensors of this scaling, {} if it has none. Raises InputError."""
    kind, pairs = hyper.rope.get("rope_type"), hyper.rotary_size // 2
    if kind == "llama3":
        return {rope.FREQS: rope.llama3_factors(hyper.rope, hyper.rope_theta, hyper.rotary_size, file=file)}
    if kind == "longrope":
        return {_LONG: _listed(hyper, "long_factor", file), _SHORT: _listed(hyper, "short_factor", file)}
    if kind == "proportional":
        rotating = rope.proportional_pairs(hyper.rope, hyper.head_size)
        return {rope.FREQS: np.where(np.arange(pairs) < rotating, np.float32(1), _FIXED).astype(np.float32)}
    return {}


def _listed(hyper: Hyper, key: str, file: object) -> F32:
    values, pairs = hyper.rope.get(key), hyper.rotary_size // 2
    numbers = isinstance(values, list | tuple) and all(
        isinstance(v, int | float) and not isinstance(v, bool) for v in values
    )
    if not numbers or len(values or ()) != pairs:
        raise InputError(f"{key} of the RoPE scaling cannot be right", file=file, expected=f"{pairs} values")
    return np.asarray(values, np.float32)


def restored(
    checkpoint: Checkpoint, hyper: Hyper, dropped: dict[str, str], warnings: list[str]
) -> Mapping[str, Any] | None:
    """Return Hyper.rope from the tensors of a GGUF file, None without such tensors. Raises InputError."""
    tensors = {name: _values(checkpoint, name, hyper) for name in NAMES if name in checkpoint.weights}
    if _LONG in tensors and _SHORT in tensors:
        dropped |= dict.fromkeys((_LONG, _SHORT), "stored in rope_parameters (longrope)")
        return _longrope(tensors[_LONG], tensors[_SHORT], checkpoint, hyper)
    if rope.FREQS not in tensors:
        return None
    parameters = _proportional(tensors[rope.FREQS]) or rope.recognise_llama3(
        tensors[rope.FREQS], hyper.rope_theta, hyper.context
    )
    if parameters is None:
        dropped[rope.FREQS] = "no rope_parameters produce these factors"
        warnings.append(
            "rope_freqs.weight does not match a scaling that transformers supports: it was dropped, "
            "long contexts will suffer"
        )
        return None
    dropped[rope.FREQS] = f"stored in rope_parameters ({parameters['rope_type']})"
    return parameters


def _values(checkpoint: Checkpoint, name: str, hyper: Hyper) -> F32:
    weight, expected = checkpoint.weights[name], (hyper.rotary_size // 2,)
    if weight.shape != expected:
        raise InputError("wrong shape", file=checkpoint.path, tensor=name, expected=expected, found=weight.shape)
    return np.asarray(weight.dequantize(), np.float32)


def _proportional(factors: F32) -> dict[str, Any] | None:
    """Return the fraction of pairs that rotate; None if the divisors have a different form."""
    rotating = int(np.sum(factors == 1))
    if (
        not rotating < len(factors)
        or not np.all(factors[:rotating] == 1)
        or not np.all(factors[rotating:] >= _FIXED / 10)
    ):
        return None
    return {"rope_type": "proportional", "partial_rotary_factor": rotating / len(factors)}


def _longrope(long: F32, short: F32, checkpoint: Checkpoint, hyper: Hyper) -> dict[str, Any]:
    prefix = f"{checkpoint.metadata.get('general.architecture')}.rope.scaling."
    original = checkpoint.metadata.get(f"{prefix}original_context_length", hyper.context)
    parameters: dict[str, Any] = {
        "rope_type": "longrope",
        "long_factor": [rope.shortest(float(v)) for v in long],
        "short_factor": [rope.shortest(float(v)) for v in short],
        "original_max_position_embeddings": original,
    }
    factor = checkpoint.metadata.get(f"{prefix}attn_factor")
    if isinstance(factor, float) and not np.isclose(factor, rope.longrope_factor(parameters, hyper.context), rtol=1e-6):
        parameters["attention_factor"] = rope.shortest(factor)
    return parameters
