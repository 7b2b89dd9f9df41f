"""ModelOpt's weights in a Hugging Face folder (quant_method "modelopt", hf_quant_config.json).

    FP8                        X.weight F8, X.weight_scale F32 [], X.input_scale F32 []            codecs/fp8.py
    FP8_PER_CHANNEL_PER_TOKEN  X.weight_scale F32 [N]
    fp8_pb_wo                  X.weight_scale F32 [N / 128, 1, K / 128, 1], or [] for one block
    NVFP4, W4A16_NVFP4         X.weight U8 [N, K / 2], X.weight_scale F8 [N, K / 16],
                               X.weight_scale_2 F32 [], which multiplies [X.input_scale]           codecs/hf_nvfp4.py
    mxfp4, MXFP8               X.weight U8 or F8, X.weight_scale U8 [N, K / 32]                    codecs/hf_mxfp4.py
    W4A16_AWQ                  X.weight U8 [N / 2, K], X.weight_scale F32 [N, G]
                               [X.pre_quant_scale [K]]                                       codecs/modelopt_int4.py

MIXED_PRECISION                an algorithm per module, in `quantized_layers`

Scales of the key and value cache (X.k_scale, X.v_scale) stay separate tensors. Other algorithms are named but not
decoded.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from polyquant.codecs.affine_forms import integers_of
from polyquant.codecs.float_forms import scales_inputs, small_floats_of
from polyquant.codecs.fp8 import FP8
from polyquant.codecs.hf_mxfp4 import HF_MXFP4
from polyquant.codecs.hf_mxfp8 import HF_MXFP8
from polyquant.codecs.hf_nvfp4 import HFNvfp4
from polyquant.codecs.modelopt_int4 import ModelOptInt4
from polyquant.errors import InputError, printable
from polyquant.formats.huggingface.scheme import Described, QuantizedWeight, Read, fitting, float_word, require
from polyquant.formats.huggingface.schemes import LinearLayers, StoredTensor, group_sizes
from polyquant.formats.huggingface.small_floats import (
    KINDS,
    fp8_weight,
    held_fp8,
    held_mx,
    mxfp4_weight,
    mxfp8_weight,
    nvfp4_weight,
    stored_as,
    without,
)
from polyquant.types import Codec, Shape, TensorSpec

__all__ = ["SCHEME", "SETTINGS", "modules", "weight_of"]

SETTINGS = "hf_quant_config.json"
_NVFP4 = {p: p for p in ("weight", "weight_scale", "weight_scale_2", "input_scale")}
_BLOCK = 128
_OF_FLOATS = {
    "FP8": "FP8", "FP8_PER_CHANNEL_PER_TOKEN": "FP8", "FP8_PB_WO": "FP8", "MXFP8": "FP8", "NVFP4": "4",
    "W4A16_NVFP4": "4", "MXFP4": "4",
}  # fmt: skip
"""Algorithm in upper case -> the kind of its codes."""
_INT4 = ("W4A16_AWQ", "MIXED_PRECISION")
"""Algorithms that may store symmetric 4-bit integers; W4A8_AWQ has different scales."""


def modules(tensors: Mapping[str, Described]) -> Iterator[str]:
    """Modules with X.weight of bytes or 8-bit floats, and X.weight_scale."""
    for name, tensor in tensors.items():
        module, _, part = name.rpartition(".")
        if part == "weight" and tensor.dtype in ("U8", *KINDS) and f"{module}.weight_scale" in tensors:
            yield module


def weight_of(
    module: str, tensors: Mapping[str, Described], settings: Mapping[str, Any], read: Read
) -> QuantizedWeight | str:
    """Read one weight. Raises InputError, also if config.json names an algorithm that the tensors contradict."""
    del read
    algorithm = _algorithm(settings, module)
    kind = _OF_FLOATS.get(algorithm.upper())
    weight, scale = tensors[f"{module}.weight"], tensors[f"{module}.weight_scale"]
    four = weight.dtype == "U8"
    if four and algorithm.upper() in _INT4 and scale.dtype == "F32":
        return _int4(module, tensors)
    if f"{module}.pre_quant_scale" in tensors:  # without it the weights would be wrong
        return f"modelopt {printable(algorithm, 40)} with pre_quant_scale"
    if four and scale.dtype not in ("U8", "F8_E4M3"):
        return f"modelopt {printable(algorithm, 40)}".rstrip()
    if kind is not None and (kind == "4") is not four:
        raise InputError(
            "config.json contradicts the weights",
            tensor=module,
            expected=f"{printable(algorithm, 40)}, {'U8' if kind == '4' else 'F8_E4M3'} weights",
            found=weight.dtype,
        )
    if four and scale.dtype == "U8":
        found = mxfp4_weight(module, tensors, "weight", "weight_scale")
    elif four:
        found = nvfp4_weight(module, tensors, HFNvfp4("multiplies", f"{module}.input_scale" in tensors), _NVFP4)
    elif scale.dtype == "U8":
        found = mxfp8_weight(module, tensors)
    else:
        blocks = algorithm.upper() == "FP8_PB_WO"
        found = fp8_weight(module, tensors, "weight_scale", (_BLOCK, _BLOCK), blocks=blocks)
    name = f"{module}.input_scale"
    lost = (name,) if name in tensors and name not in found.tensors.values() else ()
    return replace(found, spare=lost, lost=lost)


def _int4(module: str, tensors: Mapping[str, Described]) -> QuantizedWeight:
    """Two rows of 4-bit codes per byte. Raises InputError."""
    half, k = require(module, "weight", tensors, 2).shape
    groups = require(module, "weight_scale", tensors, 2).shape[1]
    if k % groups:
        raise InputError("groups do not divide the inputs", tensor=module, expected=f"a divisor of {k}", found=groups)
    factors = tensors.get(f"{module}.pre_quant_scale")
    pre = "" if factors is None else float_word(module, "pre_quant_scale", factors)
    return fitting(module, (2 * half, k), ModelOptInt4(k // groups if groups > 1 else 0, pre), tensors)


def _algorithm(settings: Mapping[str, Any], module: str) -> str:
    """The algorithm of a module: its own one, or that of the closest module around it, or the folder's."""
    layers, name = settings.get("quantized_layers"), module
    while isinstance(layers, dict) and name:
        if isinstance(layer := layers.get(name), dict):
            settings = layer
            break
        name = name.rpartition(".")[0]
    algorithm = settings.get("quant_algo")
    return algorithm if isinstance(algorithm, str) else ""


class _ModelOpt(LinearLayers):
    """Writing ModelOpt's folders."""

    name, title = "modelopt", "ModelOpt weights"

    def holds(self, codec: Codec) -> bool:
        """True for the codecs in ModelOpt's layout."""
        if isinstance(codec, FP8):
            whole = not codec.inv and codec.dtype == "f32" and codec.block in (0, _BLOCK)
            return whole and codec.kind == "e4m3" and (not codec.static or codec.tensor)
        if isinstance(codec, HFNvfp4):
            return codec.tensor == "multiplies"
        return codec in (HF_MXFP4, HF_MXFP8) or isinstance(codec, ModelOptInt4)

    def holding(self, codec: Codec, shape: Shape) -> Codec | None:
        """The codec for the codes of another one, with float32 scales; None for integers of more than 4 bits."""
        have, integers = small_floats_of(codec), integers_of(codec)
        if len(shape) != 2 or (have is None and integers is None):
            return None
        if self.holds(codec):
            return codec
        if have is None:
            assert integers is not None
            return None if integers.bits > 4 or shape[0] % 2 else ModelOptInt4(integers.group)
        if (powers := held_mx(have)) is not None:
            return powers
        if have.element == "e2m1":
            return HFNvfp4(static=scales_inputs(codec))
        held = held_fp8(codec, inv=False, dtype="f32")
        if held is not None and held.tensor and not held.static:
            held = replace(held, tensor=False)  # FP8 with one scale has static inputs; with one per row it has none
        return held if held is not None and self.holds(held) else None

    def stored(self, tensor: TensorSpec) -> list[StoredTensor]:
        """The parts; scalars without dimensions, scales of blocks with four. Raises PlanError."""
        codec, shapes = tensor.codec, dict[str, Shape]()
        if isinstance(codec, (FP8, HFNvfp4)):
            shapes = {part: () for part, line in codec.lines.items() if line == 0}
        if isinstance(codec, FP8) and not codec.tensor:
            rows, columns = codec.specs(tensor.shape)[codec.scale].shape
            many: Shape = () if rows == columns == 1 else (rows, 1, columns, 1)
            shapes[codec.scale] = many if codec.block else (rows,)
        return stored_as(tensor, {"blocks": "weight", "scales": "weight_scale"}, shapes)

    def settings(self, tensors: Sequence[TensorSpec], config: Mapping[str, Any]) -> dict[str, Any]:
        """quantization_config as ModelOpt repeats it in config.json."""
        described = self._described(tensors)
        algorithm, excluded = described["quant_algo"], described["exclude_modules"]
        layers = described.get("quantized_layers")
        groups = _config_groups(algorithm, layers)
        cache = {"kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}}
        return {
            "quantization_config": {
                **({"config_groups": groups} if groups else {}),
                **({} if layers is None else {"quantized_layers": layers}),
                "ignore": excluded,
                "quant_algo": algorithm,
                **(cache if described["kv_cache_quant_algo"] else {}),
                "producer": _PRODUCER,
                "quant_method": "modelopt",
            }
        }

    def files(self, tensors: Sequence[TensorSpec]) -> dict[str, bytes]:
        """hf_quant_config.json, which ModelOpt's readers take first."""
        content = {"producer": _PRODUCER, "quantization": self._described(tensors)}
        return {SETTINGS: (json.dumps(content, indent=4) + "\n").encode()}

    def _described(self, tensors: Sequence[TensorSpec]) -> dict[str, Any]:
        """The entry `quantization` of hf_quant_config.json: one algorithm, or one for each module."""
        sizes = group_sizes(tensors)
        layers = {t.name.removesuffix(".weight"): _layer(t, sizes) for t in tensors if self.holds(t.codec)}
        cached = any(t.name.endswith((".k_scale", ".v_scale")) for t in tensors)
        first, *others = layers.values()
        mixed = any(layer != first for layer in others)
        return {
            "quant_algo": "MIXED_PRECISION" if mixed else first["quant_algo"],
            "kv_cache_quant_algo": "FP8" if cached else None,
            **({"quantized_layers": layers} if mixed else {k: v for k, v in first.items() if k != "quant_algo"}),
            "exclude_modules": without(tensors, list(layers)),
        }


_PRODUCER = {"name": "modelopt", "version": "0.47.0"}
"""The version whose layout is written; readers check the name."""


def _layer(tensor: TensorSpec, sizes: Mapping[str, int]) -> dict[str, Any]:
    """The description of one module. sizes: columns per scale of integers."""
    algorithm = _algorithm_of(tensor.codec)
    out: dict[str, Any] = {"quant_algo": algorithm}
    if algorithm == "W4A16_AWQ":
        size = sizes[tensor.name] or tensor.shape[-1]
        return out | {"group_size": size, "has_zero_point": False, "pre_quant_scale": True}
    group = 16 if "NVFP4" in algorithm else 32 if algorithm == "MXFP8" else None
    return out if group is None else out | {"group_size": group}


def _algorithm_of(codec: Codec) -> str:
    if isinstance(codec, ModelOptInt4):
        return "W4A16_AWQ"
    if isinstance(codec, FP8):
        return "FP8" if codec.tensor else "fp8_pb_wo" if codec.block else "FP8_PER_CHANNEL_PER_TOKEN"
    if isinstance(codec, HFNvfp4):
        return "NVFP4" if codec.static else "W4A16_NVFP4"
    return "mxfp4" if codec is HF_MXFP4 else "MXFP8"


def _config_groups(algorithm: str, layers: Mapping[str, Mapping[str, Any]] | None) -> dict[str, Any]:
    """config_groups of config.json; empty where ModelOpt writes none. layers: those of a mix, grouped by kind."""
    if layers is None:
        one = _groups(algorithm, None) if algorithm == "FP8" or "NVFP4" in algorithm else {}
        return {"group_0": {**one, "targets": ["Linear"]}} if one else {}
    kinds: dict[str, list[str]] = {}
    for name, layer in layers.items():
        kinds.setdefault(json.dumps(layer), []).append(name)
    return {
        f"group_{i}": {**_groups(layer["quant_algo"], layer.get("group_size")), "targets": sorted(names)}
        for i, (layer, names) in enumerate((json.loads(kind), names) for kind, names in kinds.items())
    }


def _groups(algorithm: str, group: int | None) -> dict[str, Any]:
    """Weights and inputs of an algorithm; its name alone where ModelOpt does not describe them. group: columns."""
    if algorithm == "W4A16_AWQ":
        return {"weights": {"dynamic": False, "num_bits": 4, "type": "int", "group_size": group}}
    if "NVFP4" in algorithm:
        one: dict[str, Any] = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    elif algorithm in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "MXFP8"):
        one = {"dynamic": False, "num_bits": 8, "type": "float"} | ({"group_size": group} if group else {})
    else:
        return {"quant_algo": algorithm}
    inputs = {} if algorithm == "W4A16_NVFP4" else {"input_activations": dict(one)}
    rows = {"strategy": "channel"} if algorithm == "FP8_PER_CHANNEL_PER_TOKEN" else {}
    return {**inputs, "weights": one | rows}


SCHEME = _ModelOpt()
