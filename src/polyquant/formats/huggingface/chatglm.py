"""ChatGLM's int8 and int4 weights in a Hugging Face folder, marked by quantization_bit in config.json. Layout:
codecs/chatglm_int.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from polyquant.codecs.chatglm_int import ChatGLMInt
from polyquant.errors import InputError
from polyquant.formats.huggingface.scheme import Described, QuantizedWeight, Read, fitting, float_word, require

__all__ = ["modules", "weight_of"]


def modules(tensors: Mapping[str, Described]) -> Iterator[str]:
    """Modules with an int8 matrix X.weight."""
    for name, tensor in tensors.items():
        if name.endswith(".weight") and tensor.dtype == "I8" and len(tensor.shape) == 2:
            yield name.removesuffix(".weight")


def weight_of(
    module: str, tensors: Mapping[str, Described], settings: Mapping[str, Any], read: Read
) -> QuantizedWeight:
    """Read one weight. Raises InputError if a tensor is missing or does not fit."""
    del read
    bits = settings.get("quantization_bit")
    if bits not in (4, 8):
        raise InputError("unsupported ChatGLM weight", tensor=module, expected="quantization_bit 4 or 8", found=bits)
    n, stored = require(module, "weight", tensors, 2).shape
    scale = require(module, "weight_scale", tensors, 1)
    return fitting(
        module, (n, stored * 8 // bits), ChatGLMInt(bits, float_word(module, "weight_scale", scale)), tensors
    )
