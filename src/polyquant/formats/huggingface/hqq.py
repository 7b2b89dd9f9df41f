"""HQQ weights of a Hugging Face folder, as hqq and transformers save them. Layout: codecs/hqq.py.

    X.W_q  X.scale  X.zero          and how to read them, one tensor each, instead of in config.json:
    X.nbits  X.group_size  X.axis   numbers              X.shape    i64 [2]
    X.packing                       the bytes of a word such as 4bit_u8

W_q may be viewed as floats (view_as_float): the bytes are the same. More tensors describe how the weight was made.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from polyquant.codecs.dtypes import BY_NUMPY, NUMPY
from polyquant.codecs.hqq import HQQ
from polyquant.errors import CodecError, InputError, printable
from polyquant.formats.huggingface.scheme import Described, QuantizedWeight, Read, float_word

__all__ = ["modules", "weight_of"]

_PACKINGS = {"8bit_u8": 8, "4bit_u8": 4, "3bit_32": 3, "2bit_u8": 2, "1bit_u8": 1}
_INTEGERS = ("I32", "I64", "U8")
_SPARE = (
    "nbits", "group_size", "shape", "axis", "packing", "unpack_view_dtype", "view_as_float", "quant_scale",
    "quant_zero", "compute_dtype", "offload_meta", "encoded_state_dict", "stores_quant_config", "channel_wise",
    "optimize", "round_zero",
)  # fmt: skip
_LARGEST = 1 << 30


def modules(tensors: Mapping[str, Described]) -> Iterator[str]:
    """Modules with a tensor X.W_q."""
    return (name.removesuffix(".W_q") for name in tensors if name.endswith(".W_q"))


def weight_of(
    module: str, tensors: Mapping[str, Described], settings: Mapping[str, Any], read: Read
) -> QuantizedWeight:
    """Read one weight; its own tensors decide, not config.json. Raises InputError."""
    del settings
    n, k = _numbers(module, "shape", 2, tensors, read)
    group, axis = (_numbers(module, part, 1, tensors, read)[0] for part in ("group_size", "axis"))
    packing = _word(module, tensors, read)
    if axis not in (0, 1) or packing not in _PACKINGS:
        raise InputError(
            "unsupported HQQ weight",
            tensor=module,
            expected=f"axis 0 or 1, packing {', '.join(_PACKINGS)}",
            found=f"axis {axis}, packing {printable(packing, 40)}",
        )
    scale = tensors.get(f"{module}.scale")
    if scale is None:
        raise InputError("quantized weight lacks scale", tensor=module, hint="quantized scales are not supported")
    codec = HQQ(_PACKINGS[packing], group, axis, float_word(module, "scale", scale))
    try:
        specs = codec.specs((n, k))
    except CodecError as e:
        raise InputError(e.message, tensor=module, expected=e.expected, found=e.found) from None
    for part, spec in specs.items():
        tensor = tensors.get(f"{module}.{part}")
        if tensor is None:
            raise InputError(f"quantized weight lacks {part}", tensor=module)
        viewed = part == "W_q" and tensor.dtype in NUMPY  # any dtype of as many bytes
        size = NUMPY[tensor.dtype].itemsize * math.prod(tensor.shape) if viewed else 0
        if size != spec.nbytes if viewed else (tensor.dtype, tensor.shape) != (BY_NUMPY[spec.dtype], spec.shape):
            raise InputError(
                f"{part} does not fit the weight",
                tensor=module,
                expected=f"{BY_NUMPY[spec.dtype]} {list(spec.shape)}",
                found=f"{tensor.dtype} {list(tensor.shape)}",
            )
    spare = tuple(name for part in _SPARE if (name := f"{module}.{part}") in tensors)
    return QuantizedWeight(f"{module}.weight", (n, k), codec, {part: f"{module}.{part}" for part in specs}, spare)


def _numbers(module: str, part: str, count: int, tensors: Mapping[str, Described], read: Read) -> list[int]:
    """Positive integers of a small tensor; axis may be 0. Raises InputError."""
    tensor = tensors.get(f"{module}.{part}")
    shapes = [(count,)] if count > 1 else [(), (1,)]
    if tensor is None or tensor.dtype not in _INTEGERS or tensor.shape not in shapes:
        found = "nothing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
        raise InputError(
            f"{part} has an unexpected shape or dtype", tensor=module, expected=f"I32 {list(shapes[0])}", found=found
        )
    values = [int(x) for x in read(f"{module}.{part}")]
    if not all((part == "axis" and v == 0) or 0 < v <= _LARGEST for v in values):
        raise InputError(
            f"{part} is out of range", tensor=module, expected=f"1 to {_LARGEST}", found=", ".join(map(str, values))
        )
    return values


def _word(module: str, tensors: Mapping[str, Described], read: Read) -> str:
    """The word in `packing`: one character per byte. Raises InputError."""
    tensor = tensors.get(f"{module}.packing")
    if tensor is None or tensor.dtype != "U8" or len(tensor.shape) != 1 or not 0 < tensor.shape[0] <= 40:
        found = "nothing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
        raise InputError("packing has an unexpected shape or dtype", tensor=module, expected="U8 [7]", found=found)
    return bytes(read(f"{module}.packing")).decode("latin-1")
