"""Conversion of another tool's quantized state dict to msModelSlim: tensors, and the description of their types.

    q [n, k] int8    s, z [n, 1] or [n, k / g]         weight_process             w = (q - z) s
    x [t, k]         input_scale, input_offset [1]     weight_activation_process
                                                       y = ((round(x / s_x + z_x) q^T) + quant_bias) deq_scale
    norm             module.weight, module.bias [k]    anti_outlier_process
                                                       norm(x) = x / rms(x) * module.weight + module.bias
    k, v             kv_cache_scale, _offset [n_kv]    kv_cache_process           k = (round(k / s + z) - z) s

Four independent steps; call those that apply to the source. No tensor is lost, and nothing is written before `save`.

    processor = MSModelSlimWeightProcessor(state_dict)
    processor.weight_process()
    processor.save("model-w8a16")
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from polyquant.codecs.chatglm_int import ChatGLMInt
from polyquant.errors import InputError
from polyquant.msmodelslim.pair import write_pair
from polyquant.msmodelslim.parts import deq_scale, needed, projections, quant_bias, sized, table
from polyquant.msmodelslim.state_dict import arrays_of

__all__ = ["MSModelSlimWeightProcessor"]

_LINEARS = ("self_attention.query_key_value", "self_attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
_NORMS = ("input_layernorm", "post_attention_layernorm")
_STATIC = ("W8A8", "W8A8S")
_TYPES = ("W8A16", "W4A16", "W8A8_DYNAMIC", *_STATIC)
_BF16 = np.dtype(ml_dtypes.bfloat16)


class MSModelSlimWeightProcessor:
    """Converter of a state dict. modelslim_weight_dict: name -> array; modelslim_description_json: name -> type."""

    def __init__(
        self,
        weight: Mapping[str, Any],
        *,
        quant_type: str = "W8A16",
        num_layers: int | None = None,
        linears: Sequence[str] | None = None,
        norms: Sequence[str] | None = None,
        bits: int | None = None,
    ) -> None:
        """Set the state dict and options. Raises InputError.

        weight: numpy arrays or torch tensors; not modified. quant_type: type of quantized layers in the description.
        linears, norms: names of the modules to convert. Default: those of ChatGLM's first `num_layers` layers, or
        without a number all linear layers with integer weights and all vectors named ...norm. bits: of ChatGLM's own
        weights, 4 or 8; by default derived from their columns and the norm before them.
        """
        if quant_type not in _TYPES:
            raise InputError("unknown quant_type", expected=", ".join(_TYPES), found=quant_type)
        if bits not in (None, 4, 8):
            raise InputError("unsupported number of bits", expected="4 or 8", found=bits)
        self.modelslim_weight_dict = arrays_of(weight)
        self.quant_type = quant_type
        self.modelslim_description_json: dict[str, str] = {
            "model_quant_type": quant_type,
            **dict.fromkeys(self.modelslim_weight_dict, "FLOAT"),
        }
        self._bits = bits
        self.linears = list(
            linears if linears is not None else self._modules(num_layers, _LINEARS, self._integer_linears)
        )
        self.norms = list(norms if norms is not None else self._modules(num_layers, _NORMS, self._norm_modules))

    def _modules(self, num_layers: int | None, stems: Iterable[str], detect: Any) -> list[str]:
        if num_layers is None:
            return list(detect())
        return [f"transformer.encoder.layers.{i}.{stem}" for i in range(num_layers) for stem in stems]

    def _integer_linears(self) -> Iterable[str]:
        for name, array in self.modelslim_weight_dict.items():
            if name.endswith(".weight") and array.ndim == 2 and array.dtype in (np.int8, np.uint8):
                yield name.removesuffix(".weight")

    def _norm_modules(self) -> Iterable[str]:
        for name, array in self.modelslim_weight_dict.items():
            module = name.removesuffix(".weight")
            if name != module and array.ndim == 1 and "norm" in module.rpartition(".")[2] and "layers." in module:
                yield module

    # ------------------------------------------------------------ the four steps

    def weight_process(self) -> None:
        """Convert integer weights: q int8 [n, k], scale and offset [n, 1] or [n, k / g], w = (q - offset) * scale.

        ChatGLM's int4 (two codes per byte, the first in the high nibble) is unpacked to one code per byte; 128 is
        subtracted from unsigned codes and their offsets; a missing offset is zero. Raises InputError for a layer
        without weight or weight_scale, and for shapes that do not fit.
        """
        for module in self.linears:
            codes, scale = self._needed(module, "weight"), self._needed(module, "weight_scale")
            offset = self.modelslim_weight_dict.get(f"{module}.weight_offset")
            if codes.ndim != 2 or codes.dtype not in (np.int8, np.uint8):
                raise InputError(
                    "weight is not a matrix of 8-bit integers",
                    tensor=module,
                    expected="int8 [n, k]",
                    found=f"{codes.dtype} {list(codes.shape)}",
                )
            scale = table(module, "weight_scale", scale, len(codes))
            offset = (
                np.zeros_like(scale)
                if offset is None
                else table(module, "weight_offset", offset, len(codes)).astype(scale.dtype)
            )
            if codes.dtype == np.uint8:
                codes, offset = (
                    (codes.astype(np.int16) - 128).astype(np.int8),
                    (offset.astype(np.float32) - 128).astype(scale.dtype),
                )
            elif self._halved():
                n, k = codes.shape
                half = ChatGLMInt(4, {2: "f16", 4: "f32"}[scale.itemsize] if scale.dtype != _BF16 else "bf16")
                codes = half.unpack({"weight": codes, "weight_scale": scale[:, 0]}, (n, 2 * k)).codes
            self._put(module, {"weight": codes, "weight_scale": scale, "weight_offset": offset}, self.quant_type)

    def weight_activation_process(self) -> None:
        """Convert integer weights with static input quantization.

            weight int8 [n, k], input_scale and input_offset [1], deq_scale [n], quant_bias int32 [n]
            deq_scale = input_scale * weight_scale
            quant_bias = round(bias / deq_scale - input_offset * sum over k of q)

        The last two are computed if missing. A float32 deq_scale becomes int64 with zero-extended bits, unless the
        model computes in bfloat16 (the dtype of input_scale). The float bias is kept, but must not be added to results
        that use quant_bias. Raises InputError for types other than W8A8 and W8A8S, and for missing or mismatched
        tensors.
        """
        if self.quant_type not in _STATIC:
            raise InputError(
                "this type has no static input scale",
                expected='quant_type "W8A8" or "W8A8S"',
                found=self.quant_type,
            )
        for module in self.linears:
            codes = self._needed(module, "weight")
            if codes.ndim != 2 or codes.dtype != np.int8:
                raise InputError(
                    "weight is not an int8 matrix",
                    tensor=module,
                    expected="int8 [n, k]",
                    found=f"{codes.dtype} {list(codes.shape)}",
                )
            weights, n = self.modelslim_weight_dict, len(codes)
            grid = {part: sized(weights, module, part, 1) for part in ("input_scale", "input_offset")}
            deq = deq_scale(weights, module, grid["input_scale"], n)
            stored = deq if grid["input_scale"].dtype == _BF16 else deq.view(np.uint32).astype(np.int64)
            bias = quant_bias(weights, module, codes, grid["input_offset"], deq)
            inputs = {
                p: weights[f"{module}.{p}"] for p in ("weight_scale", "weight_offset") if f"{module}.{p}" in weights
            }
            parts = {"weight": codes, **grid, "deq_scale": stored, "quant_bias": bias, **inputs}
            self._put(module, parts, self.quant_type)

    def anti_outlier_process(self, original: Mapping[str, Any] | None = None) -> None:
        """Convert smoothed norms: module.weight and module.bias hold the smoothed norm.weight and norm.bias (or 0).

        original: the unsmoothed norm.weight by full name, needed by layers that stay in float. Without it the smoothed
        one is kept under that name too, as the tool itself does. Raises InputError for a missing norm.
        """
        before = arrays_of(original or {})
        for module in self.norms:
            weight = self._needed(module, "weight")
            bias = self.modelslim_weight_dict.get(f"{module}.bias", np.zeros_like(weight))
            for part, array in (("weight", weight), ("bias", bias)):
                if array.shape != weight.shape or array.ndim != 1:
                    raise InputError(
                        f"{part} of a norm does not fit",
                        tensor=module,
                        expected=list(weight.shape),
                        found=list(array.shape),
                    )
            self._put(module, {"module.weight": weight, "module.bias": bias}, self.quant_type)
            self._put(module, {"weight": before.get(f"{module}.weight", weight), "bias": bias}, "FLOAT")

    def kv_cache_process(self) -> None:
        """Convert scales and offsets of an int8 KV cache, one per channel of k and v: X.k_proj.kv_cache_scale, ...

            q = clamp(round(x / scale + offset), -128, 127)           x = (q - offset) * scale

        The kv_cache_scale of a fused layer X is split into those of k and v; a missing offset is zero; the misspelt
        kv_cacahe_scale is accepted. Raises InputError if there is no scale, and for an offset that does not fit its
        scale.
        """
        scales = {
            n.removesuffix(end): n
            for end in (".kv_cacahe_scale", ".kv_cache_scale")
            for n in self.modelslim_weight_dict
            if n.endswith(end)
        }
        if not scales:
            raise InputError("the state dict has no cache scale", expected="...kv_cache_scale")
        self.modelslim_description_json["kv_cache_type"] = "C8"
        for module, name in scales.items():
            scale = self._take(name).reshape(-1)
            offset = (
                self._take(f"{module}.kv_cache_offset")
                if f"{module}.kv_cache_offset" in self.modelslim_weight_dict
                else np.zeros_like(scale)
            )
            if offset.size != scale.size:
                raise InputError(
                    "cache offset does not fit its scale", tensor=module, expected=scale.size, found=offset.size
                )
            for place, half in projections(module, scale.size):
                self._put(
                    place,
                    {"kv_cache_scale": scale[half], "kv_cache_offset": offset.reshape(-1)[half].astype(scale.dtype)},
                    self.quant_type,
                )

    # ------------------------------------------------------------ what the steps share

    def _needed(self, module: str, part: str) -> NDArray[Any]:
        return needed(self.modelslim_weight_dict, module, part)

    def _put(self, module: str, parts: Mapping[str, NDArray[Any]], kind: str) -> None:
        for part, array in parts.items():
            self.modelslim_weight_dict[f"{module}.{part}"] = np.ascontiguousarray(array)
            self.modelslim_description_json[f"{module}.{part}"] = kind

    def _take(self, name: str) -> NDArray[Any]:
        self.modelslim_description_json.pop(name, None)
        return self.modelslim_weight_dict.pop(name)

    def _halved(self) -> bool:
        """Return True if a byte holds two codes: from `bits`, or from the shape of ChatGLM's first matrix.

        Raises InputError.
        """
        if self._bits is None:
            self._bits = self._seen_bits()
        return self._bits == 4

    def _seen_bits(self) -> int:
        fused = next((m for m in self.linears if m.endswith(".self_attention.query_key_value")), None)
        if fused is None:
            return 8
        norm = self.modelslim_weight_dict.get(
            f"{fused.removesuffix('self_attention.query_key_value')}input_layernorm.weight"
        )
        columns = self._needed(fused, "weight").shape[-1]
        if norm is None or norm.size not in (columns, 2 * columns):
            raise InputError(
                "cannot tell whether a byte holds one code or two", tensor=fused, hint="pass bits=4 or bits=8"
            )
        return 4 if norm.size == 2 * columns else 8

    # ------------------------------------------------------------ the files

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write quant_model_weight_TYPE.safetensors and quant_model_description_TYPE.json to a new folder, atomically.

        Raises PlanError if it exists, InputError for a dtype not supported by safetensors, OSError.
        """
        weights = arrays_of(self.modelslim_weight_dict)
        write_pair(Path(path), weights, self.modelslim_description_json, self.quant_type.lower())
