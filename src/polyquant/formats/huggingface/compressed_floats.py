"""compressed-tensors weights of small floats. Integers: compressed.py.

float-quantized       X.weight F8, X.weight_scale [1], [N, 1] or blocks [N / 128, K / 128]     codecs/fp8.py
mxfp8-quantized       X.weight F8, X.weight_scale U8 [N, K / 32]                               codecs/hf_mxfp8.py
mxfp4-pack-quantized  X.weight_packed U8 [N, K / 2], X.weight_scale U8 [N, K / 32]             codecs/hf_mxfp4.py
nvfp4-pack-quantized  X.weight_packed U8, X.weight_scale F8 [N, K / 16],
                      X.weight_global_scale F32 [1], which divides [X.input_global_scale]      codecs/hf_nvfp4.py
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyquant.codecs.float_forms import scales_inputs, small_floats_of
from polyquant.codecs.fp8 import FP8
from polyquant.codecs.hf_mxfp4 import HF_MXFP4
from polyquant.codecs.hf_mxfp8 import HF_MXFP8
from polyquant.codecs.hf_nvfp4 import HFNvfp4
from polyquant.errors import InputError
from polyquant.formats.huggingface.scheme import Described, QuantizedWeight
from polyquant.formats.huggingface.schemes import StoredTensor
from polyquant.formats.huggingface.small_floats import (
    KINDS,
    fp8_weight,
    held_fp8,
    held_mx,
    mxfp4_weight,
    mxfp8_weight,
    nvfp4_weight,
    stored_as,
)
from polyquant.types import Codec, Shape, TensorSpec

__all__ = ["FORMATS", "described", "format_of", "holding", "holds", "stored", "weight_of"]

FORMATS = ("float-quantized", "naive-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized")
"""The formats of small floats."""
_NVFP4 = {
    "weight": "weight_packed", "weight_scale": "weight_scale", "weight_scale_2": "weight_global_scale",
    "input_scale": "input_global_scale",
}  # fmt: skip
_NAMES = {"blocks": "weight_packed", "scales": "weight_scale"}


def weight_of(module: str, tensors: Mapping[str, Described], groups: list[Mapping[str, Any]]) -> QuantizedWeight | None:
    """Read one weight; None for integer codes. groups: of config.json. Raises InputError."""
    packed = tensors.get(f"{module}.weight_packed")
    scale = tensors.get(f"{module}.weight_scale")
    if packed is not None:
        if packed.dtype != "U8":
            return None
        if scale is None:
            raise InputError("quantized weight lacks weight_scale", tensor=module)
        if f"{module}.weight_global_scale" in tensors or scale.dtype == "F8_E4M3":
            static = f"{module}.input_global_scale" in tensors
            return nvfp4_weight(module, tensors, HFNvfp4("divides", static), _NVFP4)
        return mxfp4_weight(module, tensors, "weight_packed", "weight_scale")
    weight = tensors.get(f"{module}.weight")
    if weight is None or weight.dtype not in KINDS or scale is None:
        return None
    if scale.dtype == "U8":
        return mxfp8_weight(module, tensors)
    return fp8_weight(module, tensors, "weight_scale", _block(groups))


def _block(groups: list[Mapping[str, Any]]) -> tuple[int, int] | None:
    """The first block_structure of the groups."""
    for group in groups:
        weights = group.get("weights")
        sides = weights.get("block_structure") if isinstance(weights, dict) else None
        if isinstance(sides, list) and len(sides) == 2 and all(type(side) is int for side in sides):
            return sides[0], sides[1]
    return None


def holds(codec: Codec) -> bool:
    """True for the codecs of small floats in the layout of compressed-tensors."""
    if isinstance(codec, FP8):
        return codec.kind == "e4m3" and not codec.inv and codec.dtype != "e8m0"
    return codec in (HF_MXFP4, HF_MXFP8) or (isinstance(codec, HFNvfp4) and codec.tensor == "divides")


def holding(codec: Codec, shape: Shape) -> Codec | None:
    """The codec for the codes of another codec of small floats, as exact as possible; None if there is none."""
    have = small_floats_of(codec)
    if have is None or len(shape) != 2:
        return None
    if holds(codec):
        return codec
    if (powers := held_mx(have)) is not None:
        return powers
    if have.element == "e2m1":
        return HFNvfp4("divides", scales_inputs(codec))
    return held_fp8(codec, inv=False, dtype="bf16" if have.scale == "e8m0" else None)


def stored(tensor: TensorSpec) -> list[StoredTensor]:
    """The tensors in the file of one weight. Raises PlanError."""
    return stored_as(tensor, _NVFP4 if isinstance(tensor.codec, HFNvfp4) else _NAMES, {})


def format_of(codec: Codec) -> str:
    """The format's name in config.json."""
    if codec is HF_MXFP4:
        return "mxfp4-pack-quantized"
    if codec is HF_MXFP8:
        return "mxfp8-quantized"
    return "float-quantized" if isinstance(codec, FP8) else "nvfp4-pack-quantized"


def described(codec: Codec) -> dict[str, Any]:
    """The group entries `weights` and `input_activations`. Inputs are quantized where readers need it: 8-bit weights
    have 8-bit inputs; 4-bit weights have them only with a scale of the inputs.
    """
    if isinstance(codec, FP8):
        strategy = "tensor" if codec.tensor else "block" if codec.block else "channel"
        inputs = {"tensor": "tensor" if codec.static else "token", "block": "group", "channel": "token"}[strategy]
        weights = _arguments(8, strategy, block=[codec.block] * 2 if codec.block else None)
        group = codec.block if strategy == "block" else None
        activations: dict[str, Any] | None = _arguments(8, inputs, group, dynamic=not codec.static)
    elif isinstance(codec, HFNvfp4):
        weights = _arguments(4, "tensor_group", 16, scale="torch.float8_e4m3fn")
        local = _arguments(4, "tensor_group", 16, scale="torch.float8_e4m3fn", dynamic="local")
        activations = local if codec.static else None
    else:
        bits = 4 if codec is HF_MXFP4 else 8
        weights = _arguments(bits, "group", 32, scale="torch.uint8")
        activations = _arguments(bits, "group", 32, scale="torch.uint8", dynamic=True) if bits == 8 else None
    return {"weights": weights, "input_activations": activations, "output_activations": None}


def _arguments(
    bits: int, strategy: str, group: int | None = None, *, block: list[int] | None = None, scale: str | None = None,
    dynamic: bool | str = False,
) -> dict[str, Any]:  # fmt: skip
    """The arguments of a quantization, as in config.json."""
    return {
        "actorder": None, "block_structure": block, "dynamic": dynamic, "group_size": group, "num_bits": bits,
        "observer": None if dynamic is True else "minmax", "observer_kwargs": {}, "scale_dtype": scale,
        "strategy": strategy, "symmetric": True, "type": "float", "zp_dtype": None,
    }  # fmt: skip
