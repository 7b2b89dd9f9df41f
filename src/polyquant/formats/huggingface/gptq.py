"""GPTQ weights of a Hugging Face folder (AutoGPTQ, GPTQModel). Layout: codecs/gptq.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from polyquant.codecs.gptq import BITS, GPTQ
from polyquant.errors import InputError
from polyquant.formats.huggingface.scheme import Described, QuantizedWeight, Read, fitting, float_word, require

__all__ = ["modules", "weight_of"]


def modules(tensors: Mapping[str, Described]) -> Iterator[str]:
    """Modules with a tensor X.qweight."""
    return (name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight"))


def weight_of(
    module: str, tensors: Mapping[str, Described], settings: Mapping[str, Any], read: Read
) -> QuantizedWeight:
    """Read one weight. Bits come from config.json, or from g_idx, which shows K, if this module differs. Raises
    InputError.
    """
    packing = settings.get("checkpoint_format", settings.get("format", "gptq"))
    if packing not in ("gptq", "gptq_v2"):
        raise InputError(
            "GPTQ weights in a kernel-specific order are not supported",
            tensor=module,
            expected="checkpoint_format gptq or gptq_v2",
            found=packing,
        )
    words, n = require(module, "qweight", tensors, 2).shape
    scales = require(module, "scales", tensors, 2)
    index = tensors.get(f"{module}.g_idx")
    bits = settings.get("bits")
    k = words * 32 // bits if isinstance(bits, int) and bits in BITS else 0
    if index is not None and len(index.shape) == 1 and index.shape[0]:
        k = index.shape[0]
        bits = 32 * words // k
    if bits not in BITS or k * bits != 32 * words:
        raise InputError(
            "unsupported GPTQ weight",
            tensor=module,
            expected="2, 3, 4 or 8 bits that fill the words",
            found=f"bits {settings.get('bits')}, {words} rows of words",
        )
    groups = scales.shape[0]
    if k % groups:
        raise InputError("groups do not divide the inputs", tensor=module, expected=f"a divisor of {k}", found=groups)
    group = k // groups if groups > 1 else 0
    ordered = index is not None and not _counts_up(f"{module}.g_idx", index, k // groups, read)
    codec = GPTQ(bits, group, packing == "gptq_v2", ordered, float_word(module, "scales", scales))
    return fitting(module, (n, k), codec, tensors, spare=("g_idx",))


def _counts_up(name: str, index: Described, group: int, read: Read) -> bool:
    """True if column k is in group k // group."""
    if index.dtype != "I32" or len(index.shape) != 1:
        raise InputError(
            "g_idx has an unexpected shape or dtype",
            tensor=name,
            expected="I32 [K]",
            found=f"{index.dtype} {list(index.shape)}",
        )
    return bool(np.array_equal(read(name), np.arange(index.shape[0]) // group))
