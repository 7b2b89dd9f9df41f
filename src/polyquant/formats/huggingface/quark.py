"""AMD Quark weights of a Hugging Face folder, in the codecs of other tools that have the same bytes.

    8-bit floats   X.weight f8 [N, K]     X.weight_scale [] or [N]                                    codecs/fp8.py
    int8           X.weight i8 [N, K]     X.weight_scale [N], X.weight_zero_point i8 [N]   codecs/compressed_tensors.py
    MXFP4          X.weight u8 [N, K / 2], X.weight_scale u8 [N, K / 32]                              codecs/hf_mxfp4.py
    uint4          X.weight i32 [K, N / 8], X.weight_scale [G, N], X.weight_zero_point i32 [G, N / 8]  codecs/awq.py

config.json has the dtype of the weights and the order of packed ones (pack_method "reorder": that of AWQ). Signed 4-bit
codes, FP4 with other scales and other types are not decoded. Static input scales are omitted with a note.
Source: the package amd-quark 0.13 (facts), whose files are in tests/vectors/hub_readonly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from polyquant.codecs.dtypes import BY_NUMPY
from polyquant.errors import CodecError, InputError, printable
from polyquant.formats.huggingface.scheme import Described, QuantizedWeight, Read, float_word, require
from polyquant.formats.huggingface.small_floats import mxfp4_weight
from polyquant.registry import codec as codec_named
from polyquant.types import Codec, Shape

__all__ = ["modules", "weight_of"]

_FLOATS = {"F8_E4M3": "e4m3", "F8_E5M2": "e5m2"}
_SCALE, _ZERO, _GRID = "weight_scale", "weight_zero_point", "input_scale"
_GROUP = 1 << 20


def modules(tensors: Mapping[str, Described]) -> Iterator[str]:
    """Modules with X.weight and X.weight_scale."""
    for name in tensors:
        module = name.removesuffix(f".{_SCALE}")
        if module != name and f"{module}.weight" in tensors:
            yield module


def weight_of(
    module: str, tensors: Mapping[str, Described], settings: Mapping[str, Any], read: Read
) -> QuantizedWeight | str:
    """Read one weight, or name its type. Raises InputError."""
    del read
    weight = tensors[f"{module}.weight"]
    kind = _entry(settings, "global_quant_config", "weight", "dtype")
    if settings.get("layer_quant_config") or settings.get("layer_type_quant_config"):
        kind = f"{kind} and others"  # the dtype of a single module would need the tool's matching of names
    if len(weight.shape) != 2 or 0 in weight.shape:
        raise InputError("weight has an unexpected shape", tensor=module, expected="[N, K]", found=list(weight.shape))
    scale = tensors[f"{module}.{_SCALE}"]
    rows, columns = weight.shape
    if weight.dtype in _FLOATS:
        tensor = math.prod(scale.shape) == 1 and rows != 1
        name = f"fp8.{_FLOATS[weight.dtype]}" + ".tensor" * tensor + _word(module, scale, "bf16")
        return _weight(module, weight.shape, name, ("weight", _SCALE), tensors)
    if weight.dtype == "I8" and scale.shape == (rows,):
        name = "compressed.i8" + ".zp" * (f"{module}.{_ZERO}" in tensors) + _word(module, scale, "bf16")
        parts = ("weight", _SCALE, *([_ZERO] if f"{module}.{_ZERO}" in tensors else []))
        return _weight(module, weight.shape, name, parts, tensors)
    if weight.dtype == "I32" and kind == "uint4" and _entry(settings, "export", "pack_method") == "reorder":
        groups = require(module, _SCALE, tensors, 2).shape[0]
        group = rows // groups
        if rows % groups or not 0 < group < _GROUP:
            raise InputError(
                "groups do not divide the inputs", tensor=module, expected=f"a divisor of {rows}", found=groups
            )
        name = "awq.4" + (f".g{group}" if groups > 1 else "") + _word(module, scale, "f16")
        return _weight(module, (8 * columns, rows), name, ("weight", _ZERO, _SCALE), tensors)
    if weight.dtype == "U8" and scale.dtype == "U8" and kind == "fp4" and _grid(settings) == ("e8m0", 32):
        return mxfp4_weight(module, tensors, "weight", _SCALE)
    return f"quark {printable(str(kind), 40)} in {weight.dtype}"


def _grid(settings: Mapping[str, Any]) -> tuple[object, object]:
    """The kind of the scales, and the columns of each."""
    one = ("global_quant_config", "weight")
    return _entry(settings, *one, "scale_format"), _entry(settings, *one, "group_size")


def _entry(settings: object, *keys: str) -> object:
    """The value below nested objects; None if it is missing."""
    for key in keys:
        settings = settings.get(key) if isinstance(settings, Mapping) else None
    return settings


def _word(module: str, scale: Described, default: str) -> str:
    """The suffix of a codec's name for the dtype of the scales. Raises InputError."""
    word = float_word(module, _SCALE, scale)
    return f".{word}" if word != default else ""


def _weight(
    module: str, shape: Shape, name: str, parts: tuple[str, ...], tensors: Mapping[str, Described]
) -> QuantizedWeight:
    """The weight whose parts, in the order of the codec's, are these tensors. Raises InputError."""
    codec: Codec = codec_named(name)
    try:
        specs = codec.specs(shape)
    except CodecError as e:
        raise InputError(e.message, tensor=module, expected=e.expected, found=e.found) from None
    for part, spec in zip(parts, specs.values(), strict=True):
        tensor = tensors.get(f"{module}.{part}")
        if tensor is None:
            raise InputError(f"quantized weight lacks {part}", tensor=module)
        same = tuple(n for n in tensor.shape if n != 1) == tuple(n for n in spec.shape if n != 1)
        if tensor.dtype != BY_NUMPY[spec.dtype] or not same:
            raise InputError(
                f"{part} does not fit the weight",
                tensor=module,
                expected=f"{BY_NUMPY[spec.dtype]} {list(spec.shape)}",
                found=f"{tensor.dtype} {list(tensor.shape)}",
            )
    lost = tuple([f"{module}.{_GRID}"] if f"{module}.{_GRID}" in tensors else [])
    names = {own: f"{module}.{part}" for own, part in zip(specs, parts, strict=True)}
    return QuantizedWeight(f"{module}.weight", shape, codec, names, lost, lost)
