"""Matrices of 8-bit floats in a Hugging Face folder.

quant_method "fp8" (DeepSeek's blocks), "fbgemm_fp8", and compressed-tensors' float-quantized. Layout: codecs/fp8.py.
Static input scales (X.input_scale, X.activation_scale) are omitted with a note.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from polyquant.codecs.fp8 import FP8
from polyquant.errors import InputError
from polyquant.formats.huggingface.scheme import Described, QuantizedWeight, Read, fitting, float_word, require

__all__ = ["modules", "weight_of"]

_KINDS = {"F8_E4M3": "e4m3", "F8_E5M2": "e5m2"}
_POWERS = ("F8_E8M0", "U8")
_SCALES = ("weight_scale", "weight_scale_inv")
_GRID = ("input_scale", "activation_scale")


def modules(tensors: Mapping[str, Described]) -> Iterator[str]:
    """Modules with a matrix X.weight of 8-bit floats."""
    for name, tensor in tensors.items():
        if name.endswith(".weight") and tensor.dtype in _KINDS and len(tensor.shape) == 2:
            yield name.removesuffix(".weight")


def weight_of(
    module: str, tensors: Mapping[str, Described], settings: Mapping[str, Any], read: Read
) -> QuantizedWeight | str:
    """Read one weight. Block sizes come from config.json (weight_block_size); power-of-two scales (E8M0) are not
    decoded.

    Raises InputError.
    """
    del read
    weight = require(module, "weight", tensors, 2)
    n, k = weight.shape
    part = next((p for p in _SCALES if f"{module}.{p}" in tensors), None)
    if part is None:
        raise InputError("quantized weight lacks its scale", tensor=module, expected=" or ".join(_SCALES))
    scale = tensors[f"{module}.{part}"]
    if scale.dtype in _POWERS:
        return f"fp8 with power-of-two scales ({scale.dtype})"
    tensor = scale.shape in ((), (1,)) and n != 1
    block = 0 if tensor or scale.shape == (n, 1) else _block(module, settings)
    codec = FP8(_KINDS[weight.dtype], block, tensor, part == "weight_scale_inv", float_word(module, part, scale))
    lost = tuple(f"{module}.{p}" for p in _GRID if f"{module}.{p}" in tensors)
    return replace(fitting(module, (n, k), codec, tensors), spare=lost, lost=lost)


def _block(module: str, settings: Mapping[str, Any]) -> int:
    """Size of the square blocks. Raises InputError."""
    sides = settings.get("weight_block_size")
    if not (
        isinstance(sides, list)
        and len(sides) == 2
        and sides[0] == sides[1]
        and type(sides[0]) is int
        and 0 < sides[0] < 1 << 20
    ):
        raise InputError(
            "config.json does not specify the block size of the scales",
            tensor=module,
            expected="weight_block_size [128, 128]",
            found=sides,
        )
    return sides[0]
