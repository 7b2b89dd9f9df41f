"""Matrices of 8-bit floats in a Hugging Face folder.

quant_method "fp8" (DeepSeek's blocks), "fbgemm_fp8", and compressed-tensors' float-quantized. Layout: codecs/fp8.py.
Static input scales called X.input_scale are parts of the weight; X.activation_scale is omitted with a note.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from polyquant.codecs.float_forms import small_floats_of
from polyquant.codecs.fp8 import FP8
from polyquant.codecs.hf_mxfp8 import HF_MXFP8
from polyquant.errors import InputError, PlanError
from polyquant.formats.huggingface.scheme import Described, QuantizedWeight, Read, require
from polyquant.formats.huggingface.schemes import LinearLayers, linear_names
from polyquant.formats.huggingface.small_floats import KINDS, fp8_weight, held_fp8, mxfp8_weight
from polyquant.types import Codec, Shape, TensorSpec

__all__ = ["SCHEME", "modules", "weight_of"]

_SCALES = ("weight_scale", "weight_scale_inv")
_GRID = ("input_scale", "activation_scale")


def modules(tensors: Mapping[str, Described]) -> Iterator[str]:
    """Modules with a matrix X.weight of 8-bit floats."""
    for name, tensor in tensors.items():
        if name.endswith(".weight") and tensor.dtype in KINDS and len(tensor.shape) == 2:
            yield name.removesuffix(".weight")


def weight_of(
    module: str, tensors: Mapping[str, Described], settings: Mapping[str, Any], read: Read
) -> QuantizedWeight:
    """Read one weight. Block sizes come from config.json (weight_block_size). Raises InputError."""
    del read
    part = next((p for p in _SCALES if f"{module}.{p}" in tensors), None)
    if part is None:
        require(module, "weight", tensors, 2)
        raise InputError("quantized weight lacks its scale", tensor=module, expected=" or ".join(_SCALES))
    if tensors[f"{module}.{part}"].dtype == "U8" and part == "weight_scale":
        weight = mxfp8_weight(module, tensors)
    else:
        block = block_of(settings)
        weight = fp8_weight(module, tensors, part, block, blocks=part == "weight_scale_inv" and block is not None)
    taken = set(weight.tensors.values())
    lost = tuple(name for p in _GRID if (name := f"{module}.{p}") in tensors and name not in taken)
    return replace(weight, spare=lost, lost=lost)


def block_of(settings: Mapping[str, Any]) -> tuple[int, int] | None:
    """weight_block_size; None if it is not a pair of integers."""
    sides = settings.get("weight_block_size")
    pair = isinstance(sides, list) and len(sides) == 2 and all(type(side) is int for side in sides)
    return (sides[0], sides[1]) if pair and isinstance(sides, list) else None


class _FP8(LinearLayers):
    """Writing 8-bit floats with scales of blocks, as DeepSeek publishes them and vLLM, SGLang and transformers read."""

    name, title = "fp8", "FP8 weights"

    def holds(self, codec: Codec) -> bool:
        """True for e4m3 in blocks with scales called weight_scale_inv."""
        return isinstance(codec, FP8) and codec.kind == "e4m3" and codec.inv and bool(codec.block) and not codec.static

    def holding(self, codec: Codec, shape: Shape) -> Codec | None:
        """Blocks keep their scales' dtype; a scale of the tensor is repeated for each block."""
        have = small_floats_of(codec)
        if have is None or have.element != "e4m3" or codec is HF_MXFP8 or len(shape) != 2:
            return None
        side = 128 if have.block == (0, 0) else have.block[0] if have.block[0] == have.block[1] else 0
        held = held_fp8(codec, inv=True)
        if held is None or not side:
            return None
        dtype = "f32" if held.dtype == "f16" else held.dtype
        return FP8("e4m3", side, False, True, dtype)

    def settings(self, tensors: Sequence[TensorSpec], config: Mapping[str, Any]) -> dict[str, Any]:
        """quantization_config with the block size. Raises PlanError for several sizes."""
        del config
        codecs = [t.codec for t in tensors if isinstance(t.codec, FP8)]
        if len({c.block for c in codecs}) > 1:
            raise PlanError("an FP8 folder has one block size", found=", ".join(sorted({c.name for c in codecs})))
        powers = any(c.dtype == "e8m0" for c in codecs)
        return {
            "quantization_config": {
                "activation_scheme": "dynamic",
                "fmt": "e4m3",
                "quant_method": "fp8",
                **({"scale_fmt": "ue8m0"} if powers else {}),
                "weight_block_size": [codecs[0].block] * 2,
                "modules_to_not_convert": linear_names(tensors, quantized=False, scheme=self),
            }
        }


SCHEME = _FP8()
