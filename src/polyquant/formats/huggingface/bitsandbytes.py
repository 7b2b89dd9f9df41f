"""bitsandbytes weights of a Hugging Face folder: NF4, FP4 and LLM.int8. Layout: codecs/bitsandbytes.py.

    4 bits   X.weight   X.weight.absmax   X.weight.quant_map   X.weight.quant_state.bitsandbytes__nf4
             double quantization: X.weight.nested_absmax   X.weight.nested_quant_map
    int8     X.weight   X.SCB   X.weight_format

quant_state is a tensor of bytes with a JSON object: quant_type, blocksize, dtype, shape [N, K], and for double
quantization nested_blocksize, nested_dtype, nested_offset. The library stores 4-bit codes as a column of U8, or of any
other dtype that bnb_4bit_quant_storage names; the bytes are the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from polyquant.codecs.bitsandbytes import BLOCK_SIZES, NESTED_BLOCK, TABLES, BitsAndBytes4, BitsAndBytes8
from polyquant.codecs.dtypes import NUMPY
from polyquant.errors import InputError, printable
from polyquant.formats.huggingface.scheme import Described, QuantizedWeight, Read, fitting, require
from polyquant.storage import strict_json

__all__ = ["modules", "weight_of"]

_STATE = ".weight.quant_state.bitsandbytes__"
_SIGNS = (".weight.absmax", ".weight.nested_absmax", ".SCB")
_LIMIT = strict_json.Limit(4096, 64)
_DTYPES = ("bfloat16", "float16", "float32")
_LARGEST = float(np.finfo(np.float32).max)
_EXACT = 1e-6
"""Largest difference of quant_map from the library's own table, which it uses instead."""


def modules(tensors: Mapping[str, Described]) -> Iterator[str]:
    """Modules with a quant_state, or another tensor that only bitsandbytes writes."""
    seen: dict[str, None] = {}
    for name in tensors:
        if _STATE in name:
            seen[name.partition(_STATE)[0]] = None
        elif (sign := next((s for s in _SIGNS if name.endswith(s)), None)) is not None:
            seen[name.removesuffix(sign)] = None
    return iter(seen)


def weight_of(
    module: str, tensors: Mapping[str, Described], settings: Mapping[str, Any], read: Read
) -> QuantizedWeight:
    """Read one weight; its own tensors decide, not config.json. Raises InputError."""
    del settings
    if f"{module}.SCB" in tensors:
        return _int8(module, tensors, read)
    kind = next((kind for kind in TABLES if f"{module}{_STATE}{kind}" in tensors), None)
    if kind is None:
        raise InputError(
            "quantized weight lacks its quant_state",
            tensor=module,
            expected=" or ".join(_STATE[1:] + k for k in TABLES),
        )
    state_name = f"{module}{_STATE}{kind}"
    state = _state(module, state_name, tensors[state_name], kind, read)
    n, k = state["shape"]
    block, double = state["blocksize"], f"{module}.weight.nested_absmax" in tensors
    layout = "double" if double else "" if k % block == 0 else "flat"
    codec = BitsAndBytes4(kind, block, layout)
    names = {part: f"{module}.weight" + (f".{part}" if part != "weight" else "") for part in codec.specs((n, k))}
    held = {}
    if double:
        del names["nested_offset"]
        held["nested_offset"] = np.array([_nested_offset(module, state)], np.float32)
    specs = codec.specs((n, k))
    for part, name in names.items():
        dtype = None if part == "weight" else "U8" if specs[part].dtype == np.uint8 else "F32"
        _sized(module, part, tensors.get(name), specs[part].nbytes, dtype)
    _check_table(module, kind, tensors, read)
    map_name = f"{module}.weight.quant_map"
    return QuantizedWeight(f"{module}.weight", (n, k), codec, names, (state_name, map_name), held=held)


def _int8(module: str, tensors: Mapping[str, Described], read: Read) -> QuantizedWeight:
    """LLM.int8 rows. Raises InputError for the tile orders of old GPU kernels."""
    n, k = require(module, "weight", tensors, 2).shape
    order = tensors.get(f"{module}.weight_format")
    if order is not None:
        numbers = read(f"{module}.weight_format") if math.prod(order.shape) == 1 and order.dtype in NUMPY else None
        if numbers is None or numbers[0] != 0:
            raise InputError(
                "int8 weights in the order of a GPU kernel are not supported",
                tensor=module,
                expected="weight_format 0 (rows)",
                found="no single number" if numbers is None else numbers[0],
            )
    return fitting(module, (n, k), BitsAndBytes8(), tensors, spare=("weight_format",))


def _state(module: str, name: str, tensor: Described, kind: str, read: Read) -> Mapping[str, Any]:
    """The object in quant_state, with every entry checked that decides how bytes decode. Raises InputError."""
    if tensor.dtype != "U8" or len(tensor.shape) != 1 or not 0 < tensor.shape[0] <= _LIMIT.nbytes:
        raise InputError(
            "quant_state has an unexpected shape or dtype",
            tensor=module,
            expected=f"U8, 1 to {_LIMIT.nbytes} bytes of JSON",
            found=f"{tensor.dtype} {list(tensor.shape)}",
        )
    try:
        state = strict_json.typed(strict_json.parse(read(name), _LIMIT), dict, "quant_state")
    except InputError as e:
        raise InputError(f"quant_state: {e.message}", tensor=module, expected=e.expected, found=e.found) from None
    shape = state.get("shape")
    wrong: tuple[tuple[str, object, bool], ...] = (
        ("quant_type", kind, state.get("quant_type") == kind),
        ("blocksize", ", ".join(map(str, BLOCK_SIZES)), _integer(state.get("blocksize")) in BLOCK_SIZES),
        ("dtype", ", ".join(_DTYPES), state.get("dtype") in _DTYPES),
        ("shape", "[N, K], two positive integers", _is_matrix(shape)),
    )
    for key, expected, fits in wrong:
        if not fits:
            raise InputError(
                f"quant_state has an invalid {key}",
                tensor=module,
                expected=expected,
                found=printable(str(state.get(key, "nothing")), 60),
            )
    return state


def _integer(value: object) -> int:
    """The value if it is an integer (not a bool), else 0."""
    return value if type(value) is int else 0


def _is_matrix(shape: object) -> bool:
    return isinstance(shape, list) and len(shape) == 2 and all(0 < _integer(side) < 1 << 40 for side in shape)


def _nested_offset(module: str, state: Mapping[str, Any]) -> float:
    """The number that is added to every absmax. Raises InputError."""
    for key, expected in (("nested_blocksize", NESTED_BLOCK), ("nested_dtype", "float32")):
        if state.get(key) != expected:
            raise InputError(
                f"quant_state has an unsupported {key}",
                tensor=module,
                expected=expected,
                found=printable(str(state.get(key, "nothing")), 60),
            )
    offset = state.get("nested_offset")
    if not isinstance(offset, int | float) or isinstance(offset, bool) or not abs(offset) <= _LARGEST:
        raise InputError(
            "quant_state has an invalid nested_offset",
            tensor=module,
            expected="a number in the range of float32",
            found=printable(str(offset), 60),
        )
    return float(offset)


def _sized(module: str, part: str, tensor: Described | None, nbytes: int, dtype: str | None) -> None:
    """Raise InputError unless the tensor has this many bytes, and this dtype if one is given."""
    if tensor is None:
        raise InputError(f"quantized weight lacks {part}", tensor=module)
    known = tensor.dtype in NUMPY and (dtype is None or tensor.dtype == dtype)
    if not known or NUMPY[tensor.dtype].itemsize * math.prod(tensor.shape) != nbytes:
        raise InputError(
            f"{part} does not fit the shape in quant_state",
            tensor=module,
            expected=f"{nbytes} bytes" + (f" of {dtype}" if dtype is not None else ""),
            found=f"{tensor.dtype} {list(tensor.shape)}",
        )


def _check_table(module: str, kind: str, tensors: Mapping[str, Described], read: Read) -> None:
    """Raise InputError unless quant_map is the table of the 4-bit type."""
    stored = tensors.get(f"{module}.weight.quant_map")
    if stored is None or (stored.dtype, stored.shape) != ("F32", (16,)):
        found = "nothing" if stored is None else f"{stored.dtype} {list(stored.shape)}"
        raise InputError("quantized weight lacks its quant_map", tensor=module, expected="F32 [16]", found=found)
    table = read(f"{module}.weight.quant_map")
    with np.errstate(all="ignore"):
        differs = ~(np.abs(table - TABLES[kind]) <= _EXACT)
    if differs.any():
        i = int(np.flatnonzero(differs)[0])
        raise InputError(
            f"quant_map is not the table of {kind}",
            tensor=module,
            expected=f"{TABLES[kind][i]:g} for code {i}",
            found=f"{table[i]:g}",
        )
