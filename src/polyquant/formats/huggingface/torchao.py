"""torchao weights of a Hugging Face folder: integers of one byte, and 8-bit floats. Layout: codecs/torchao.py.

    X._weight_qdata   X._weight_scale   [X._weight_zero_point]      the weight X.weight

Packed 4-bit tensors (Int4Tensor and others: U8 or I32), and weights whose inputs are multiplied by a vector first
(act_pre_scale), are not decoded. Static input scales (act_quant_scale) are omitted with a note.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from polyquant.codecs.dtypes import BY_NUMPY
from polyquant.codecs.fp8 import FP8
from polyquant.codecs.torchao import TorchAOInt
from polyquant.errors import InputError
from polyquant.formats.huggingface.scheme import Described, QuantizedWeight, Read, fitting, float_word, require

__all__ = ["modules", "weight_of"]

_CODES, _SCALE, _ZERO = "_weight_qdata", "_weight_scale", "_weight_zero_point"
_GRID = ("_weight_act_quant_scale", "_weight_act_quant_zero_point")
_FLOATS = {"F8_E4M3": "e4m3", "F8_E5M2": "e5m2"}
_FEW = ("int1", "int2", "int3", "int4")
"""Names of dtypes whose codes are in the range of 4 bits."""
_DEPTH = 16


def modules(tensors: Mapping[str, Described]) -> Iterator[str]:
    """Modules with a tensor X._weight_qdata."""
    return (name.removesuffix(f".{_CODES}") for name in tensors if name.endswith(f".{_CODES}"))


def weight_of(
    module: str, tensors: Mapping[str, Described], settings: Mapping[str, Any], read: Read
) -> QuantizedWeight | str:
    """Read one weight. The range of integer codes comes from config.json. Raises InputError."""
    del read
    codes = tensors[f"{module}.{_CODES}"]
    if codes.dtype not in ("I8", *_FLOATS):
        return f"torchao packed codes ({codes.dtype})"
    if f"{module}._weight_act_pre_scale" in tensors:
        return "torchao weights with a scale of their inputs (act_pre_scale)"
    n, k = require(module, _CODES, tensors, 2).shape
    lost = tuple(f"{module}.{p}" for p in _GRID if f"{module}.{p}" in tensors)
    if codes.dtype in _FLOATS:
        weight = _floats(module, (n, k), tensors)
    else:
        scale = require(module, _SCALE, tensors, 2)
        groups = scale.shape[1]
        if k % groups:
            raise InputError(
                "groups do not divide the inputs", tensor=module, expected=f"a divisor of {k}", found=groups
            )
        few = (found := _widths(settings.get("quant_type"), _DEPTH)) and found <= set(_FEW)
        codec = TorchAOInt(
            4 if few else 8,
            k // groups if groups > 1 else 0,
            f"{module}.{_ZERO}" not in tensors,
            float_word(module, _SCALE, scale),
        )
        weight = fitting(module, (n, k), codec, tensors)
    return replace(weight, spare=lost, lost=lost)


def _floats(module: str, shape: tuple[int, int], tensors: Mapping[str, Described]) -> QuantizedWeight:
    """8-bit floats with scales per tensor, row or square block: the codec of other tools. Raises InputError."""
    (n, k), codes = shape, tensors[f"{module}.{_CODES}"]
    scale = require(module, _SCALE, tensors, 2)
    tensor = math.prod(scale.shape) == 1 and n != 1
    lines, columns = scale.shape
    block = 0 if tensor or scale.shape == (n, 1) else -(-k // columns)
    if block and (block != -(-n // lines) or (n % block or k % block)):
        raise InputError(
            f"{_SCALE} does not fit the weight",
            tensor=module,
            expected=f"[1, 1], {[n, 1]} or one per square block",
            found=list(scale.shape),
        )
    codec = FP8(_FLOATS[codes.dtype], block, tensor, False, float_word(module, _SCALE, scale))
    assert {BY_NUMPY[spec.dtype] for spec in codec.specs(shape).values()} == {codes.dtype, scale.dtype}
    return QuantizedWeight(
        f"{module}.weight", shape, codec, {"weight": f"{module}.{_CODES}", codec.scale: f"{module}.{_SCALE}"}
    )


def _widths(value: object, depth: int) -> set[str]:
    """The dtypes of weights anywhere in a torchao configuration; "int8" for those of 8 bits without such an entry."""
    if not isinstance(value, dict) or not depth:
        return set()
    out = set()
    kind, data = value.get("_type"), value.get("weight_dtype")
    if isinstance(data, dict) and isinstance(data.get("_data"), str):
        out.add(data["_data"])
    if isinstance(kind, str) and "Int8Weight" in kind:
        out.add("int8")
    for inner in value.values():
        out |= _widths(inner, depth - 1)
    return out
