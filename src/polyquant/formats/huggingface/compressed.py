"""compressed-tensors weights of a Hugging Face folder (llm-compressor) with integer codes. Layout: codecs/compressed_tensors.py.

Weights of 8-bit floats are read by formats/huggingface/fp8.py. Other formats of it (nvfp4, marlin-24) are named and not decoded. A fixed grid of the inputs, X.input_scale and X.input_zero_point, is left out,
with a note: the weights mean the same without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from polyquant.codecs.compressed_tensors import CompressedTensors
from polyquant.errors import InputError, printable
from polyquant.formats.huggingface import fp8
from polyquant.formats.huggingface.scheme import Described, Found, Read, fitting, float_word, require

__all__ = ["modules", "weight_of"]

BITS = (4, 8)
PACKED = "pack-quantized"
_DECODED = (PACKED, "int-quantized", "float-quantized", "naive-quantized")
_BYTES = ("I8", "F8_E4M3", "F8_E5M2")
_GRID = ("input_scale", "input_zero_point")


def modules(tensors: Mapping[str, Described]) -> Iterator[str]:
    """Those with X.weight_packed, or X.weight of 8 bits and a scale."""
    for name, tensor in tensors.items():
        module, _, part = name.rpartition(".")
        small = part == "weight" and tensor.dtype in _BYTES and f"{module}.weight_scale" in tensors
        if part == "weight_packed" or small:
            yield module


def weight_of(module: str, tensors: Mapping[str, Described], said: Mapping[str, Any], read: Read) -> Found | str:
    """Bits of packed codes are those of the words. Raises InputError."""
    packed = f"{module}.weight_packed" in tensors
    if packed and (tensors[f"{module}.weight_packed"].dtype != "I32" or PACKED not in _formats(said)):
        return _scheme(said)
    if not packed and tensors[f"{module}.weight"].dtype != "I8":
        floats = fp8.weight_of(module, tensors, _weights(said), read)
        return _scheme(said) if isinstance(floats, str) else floats
    if packed:
        shape = _shape(module, tensors, read)
        bits = _packed_bits(module, shape, require(module, "weight_packed", tensors, 2), said)
        if bits not in BITS:
            return f"compressed-tensors {bits}-bit {PACKED}"
    else:
        n, k = require(module, "weight", tensors, 2).shape
        shape, bits = (n, k), 8
    scale = tensors.get(f"{module}.weight_scale")
    if scale is None:
        raise InputError("quantized weight lacks weight_scale", tensor=module)
    tensor = scale.shape == (1,)
    groups = 1 if tensor or len(scale.shape) != 2 else scale.shape[1]
    if groups < 1 or shape[1] % groups:
        raise InputError(
            "groups do not divide the inputs", tensor=module, expected=f"a divisor of {shape[1]}", found=groups
        )
    zero = tensors.get(f"{module}.weight_zero_point")
    codec = CompressedTensors(
        bits, packed, shape[1] // groups if groups > 1 else 0,
        "" if zero is None else "zp" if zero.dtype == "I8" else "zpp",
        tensor, _reordered(module, shape[1] // groups, tensors, read), float_word(module, "weight_scale", scale),
        any(_dynamic(group) for group in _groups(said) if (group.get("format", said.get("format")) == PACKED) is packed),
    )  # fmt: skip
    lost = tuple(f"{module}.{part}" for part in _GRID if f"{module}.{part}" in tensors)
    found = fitting(module, shape, codec, tensors, spare=("weight_shape", "weight_g_idx"))
    return replace(found, spare=found.spare + lost, lost=lost)


def _formats(said: Mapping[str, Any]) -> list[str]:
    """The layouts: of the groups, or of the folder where these do not say."""
    formats = [f for group in _groups(said) if isinstance(f := group.get("format"), str)]
    return list(dict.fromkeys(formats or [str(said.get("format"))]))


def _scheme(said: Mapping[str, Any]) -> str:
    """The name of what is not decoded."""
    formats = [f for f in _formats(said) if f not in _DECODED] or _formats(said)
    return f"compressed-tensors {printable(', '.join(formats), 80)}"


def _groups(said: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    groups = said.get("config_groups")
    return [g for g in groups.values() if isinstance(g, dict)] if isinstance(groups, dict) else []


def _weights(said: Mapping[str, Any]) -> Mapping[str, Any]:
    """The blocks of scales, where weights of 8-bit floats have such, under the name that other tools use."""
    found = (g.get("weights") for g in _groups(said))
    sides = next((w["block_structure"] for w in found if isinstance(w, dict) and w.get("block_structure")), None)
    return {"weight_block_size": sides}


def _dynamic(group: Mapping[str, Any]) -> bool:
    """True if inputs are rounded to int8 per token."""
    inputs = group.get("input_activations")
    return (
        isinstance(inputs, dict)
        and inputs.get("dynamic") is True
        and inputs.get("num_bits") == 8
        and inputs.get("type") == "int"
    )


def _shape(module: str, tensors: Mapping[str, Described], read: Read) -> tuple[int, int]:
    """N and K of packed codes. Raises InputError."""
    stored = require(module, "weight_shape", tensors, 1)
    if stored.shape != (2,) or stored.dtype not in ("I64", "I32"):
        raise InputError(
            "weight_shape has another form",
            tensor=module,
            expected="I64 [2]",
            found=f"{stored.dtype} {list(stored.shape)}",
        )
    n, k = (int(x) for x in read(f"{module}.weight_shape"))
    return n, k


def _packed_bits(module: str, shape: tuple[int, int], words: Described, said: Mapping[str, Any]) -> int:
    """4 or 8, whichever makes the words of a row; others if config.json says them too. Raises InputError."""
    n, k = shape
    weights = (g.get("weights") for g in _groups(said))
    others: list[int] = [w["num_bits"] for w in weights if isinstance(w, dict) and type(w.get("num_bits")) is int]
    for bits in (*BITS, *others):
        if n > 0 and k > 0 and 0 < bits < 32 and words.shape == (n, -(-k * bits // 32)):
            return bits
    raise InputError(
        "weight_packed does not fit weight_shape", tensor=module, expected=f"4 or 8 bits for each of {list(shape)}", found=f"words {list(words.shape)}"
    )  # fmt: skip


def _reordered(module: str, group: int, tensors: Mapping[str, Described], read: Read) -> bool:
    """True if columns name groups in another order than they stand in; -1 stands for no order."""
    index = tensors.get(f"{module}.weight_g_idx")
    if index is None:
        return False
    if index.dtype != "I32" or len(index.shape) != 1:
        raise InputError(
            "weight_g_idx has another form",
            tensor=module,
            expected="I32 [K]",
            found=f"{index.dtype} {list(index.shape)}",
        )
    found = read(f"{module}.weight_g_idx")
    return not ((found == -1).all() or np.array_equal(found, np.arange(len(found)) // group))
