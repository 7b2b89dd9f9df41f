"""Scaled RoPE that GGUF says as tensors, divisors of the frequencies [rotated / 2], and what config.json says instead.

llama3         rope_freqs.weight: 1 where the wavelength is short, `factor` where it is long
proportional   rope_freqs.weight: 1 for the pairs that turn, 1e30 for those that do not (Gemma 4)
longrope       rope_factors_long.weight and rope_factors_short.weight, which config.json lists; a factor of the scores as metadata
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
_STILL = np.float32(1e30)
"""Divisor of a pair that does not turn."""


def constants(hyper: Hyper, file: object) -> dict[str, F32]:
    """The tensors of this scaling, {} if it has none. Raises InputError."""
    kind, pairs = hyper.rope.get("rope_type"), hyper.rotary_size // 2
    if kind == "llama3":
        return {rope.FREQS: rope.llama3_factors(hyper.rope, hyper.rope_theta, hyper.rotary_size, file=file)}
    if kind == "longrope":
        return {_LONG: _listed(hyper, "long_factor", file), _SHORT: _listed(hyper, "short_factor", file)}
    if kind == "proportional":
        turning = rope.proportional_pairs(hyper.rope, hyper.head_size)
        return {rope.FREQS: np.where(np.arange(pairs) < turning, np.float32(1), _STILL).astype(np.float32)}
    return {}


def _listed(hyper: Hyper, key: str, file: object) -> F32:
    values, pairs = hyper.rope.get(key), hyper.rotary_size // 2
    numbers = isinstance(values, list | tuple) and all(
        isinstance(v, int | float) and not isinstance(v, bool) for v in values
    )
    if not numbers or len(values or ()) != pairs:
        raise InputError(f"{key} of the RoPE scaling cannot be right", file=file, expected=f"{pairs} numbers")
    return np.asarray(values, np.float32)


def restored(
    checkpoint: Checkpoint, hyper: Hyper, dropped: dict[str, str], warnings: list[str]
) -> Mapping[str, Any] | None:
    """Hyper.rope of a GGUF file's tensors, None if it has none of them. Raises InputError."""
    found = {name: _values(checkpoint, name, hyper) for name in NAMES if name in checkpoint.weights}
    if _LONG in found and _SHORT in found:
        dropped |= dict.fromkeys((_LONG, _SHORT), "said by rope_parameters (longrope)")
        return _longrope(found[_LONG], found[_SHORT], checkpoint, hyper)
    if rope.FREQS not in found:
        return None
    said = _proportional(found[rope.FREQS]) or rope.recognise_llama3(found[rope.FREQS], hyper.rope_theta, hyper.context)
    if said is None:
        dropped[rope.FREQS] = "no rope_parameters give these factors"
        warnings.append(
            "rope_freqs.weight is not of a scaling that transformers knows: it was left out, long contexts will suffer"
        )
        return None
    dropped[rope.FREQS] = f"said by rope_parameters ({said['rope_type']})"
    return said


def _values(checkpoint: Checkpoint, name: str, hyper: Hyper) -> F32:
    weight, expected = checkpoint.weights[name], (hyper.rotary_size // 2,)
    if weight.shape != expected:
        raise InputError("wrong shape", file=checkpoint.path, tensor=name, expected=expected, found=weight.shape)
    return np.asarray(weight.dequantize(), np.float32)


def _proportional(factors: F32) -> dict[str, Any] | None:
    """The share of pairs that turn; None if the divisors say something else."""
    turning = int(np.sum(factors == 1))
    if not turning < len(factors) or not np.all(factors[:turning] == 1) or not np.all(factors[turning:] >= _STILL / 10):
        return None
    return {"rope_type": "proportional", "partial_rotary_factor": turning / len(factors)}


def _longrope(long: F32, short: F32, checkpoint: Checkpoint, hyper: Hyper) -> dict[str, Any]:
    prefix = f"{checkpoint.metadata.get('general.architecture')}.rope.scaling."
    original = checkpoint.metadata.get(f"{prefix}original_context_length", hyper.context)
    said: dict[str, Any] = {
        "rope_type": "longrope",
        "long_factor": [rope.shortest(float(v)) for v in long],
        "short_factor": [rope.shortest(float(v)) for v in short],
        "original_max_position_embeddings": original,
    }
    factor = checkpoint.metadata.get(f"{prefix}attn_factor")
    if isinstance(factor, float) and not np.isclose(factor, rope.longrope_factor(said, hyper.context), rtol=1e-6):
        said["attention_factor"] = rope.shortest(factor)
    return said
