"""AWQ weights of a Hugging Face folder (AutoAWQ, version gemm). Layout: codecs/awq.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from polyquant.codecs.awq import AWQ
from polyquant.errors import InputError
from polyquant.formats.huggingface.gptq import modules as _with_qweight
from polyquant.formats.huggingface.scheme import Described, QuantizedWeight, Read, fitting, float_word, require

__all__ = ["modules", "weight_of"]


def modules(tensors: Mapping[str, Described]) -> Iterator[str]:
    """Modules with a tensor X.qweight."""
    return _with_qweight(tensors)


def weight_of(
    module: str, tensors: Mapping[str, Described], settings: Mapping[str, Any], read: Read
) -> QuantizedWeight:
    """Read 4-bit codes in the order of the gemm kernel. Raises InputError."""
    del read
    version, bits = str(settings.get("version", "gemm")).lower(), settings.get("bits", settings.get("w_bit", 4))
    backend = settings.get("backend")
    if version != "gemm" or bits != 4 or backend == "llm-awq":
        raise InputError(
            "this variant of AWQ is not supported",
            tensor=module,
            expected="AutoAWQ version gemm, 4 bits",
            found=f"version {version}, {bits} bits" + (", llm-awq" if backend == "llm-awq" else ""),
        )
    k, words = require(module, "qweight", tensors, 2).shape
    scales = require(module, "scales", tensors, 2)
    groups = scales.shape[0]
    if k % groups:
        raise InputError("groups do not divide the inputs", tensor=module, expected=f"a divisor of {k}", found=groups)
    codec = AWQ(k // groups if groups > 1 else 0, float_word(module, "scales", scales))
    return fitting(module, (8 * words, k), codec, tensors)
