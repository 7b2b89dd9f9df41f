"""Quantized weights of other tools in a Hugging Face folder.

config.json names the method, and one module of this package each reads it.

    gptq                X.qweight X.qzeros X.scales [X.g_idx]                 gptq.py
    awq                 X.qweight X.qzeros X.scales                           awq.py
    compressed-tensors  X.weight | X.weight_packed X.weight_shape, X.weight_scale, ...  compressed.py
    fp8, fbgemm_fp8     X.weight, X.weight_scale | X.weight_scale_inv         fp8.py
    modelopt            X.weight X.weight_scale X.weight_scale_2              modelopt.py
    mxfp4               X_blocks X_scales, the weight X_blocks                mxfp4.py
    chatglm             X.weight X.weight_scale; quantization_bit             chatglm.py
    bitsandbytes        X.weight X.weight.absmax ... | X.weight X.SCB         bitsandbytes.py
    hqq                 X.W_q X.scale X.zero X.nbits X.shape ...              hqq.py
    torchao             X._weight_qdata X._weight_scale [X._weight_zero_point]  torchao.py
    quark               X.weight X.weight_scale [X.weight_zero_point]         quark.py
    MLX                 X.weight X.scales X.biases; quantization              mlx.py

Early tools wrote quantize_config.json (GPTQ) or quant_config.json (AWQ) instead, ModelOpt hf_quant_config.json: these
are read if config.json has no quantization_config. Other schemes are rejected: formats/huggingface/undecoded.py. The
linear module X becomes one weight X.weight [N, K]; X.bias is separate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from polyquant.formats.huggingface import (
    awq,
    bitsandbytes,
    chatglm,
    compressed,
    fp8,
    gptq,
    hqq,
    mlx,
    modelopt,
    mxfp4,
    quark,
    torchao,
)
from polyquant.formats.huggingface.scheme import Described, QuantizedWeight, Read
from polyquant.storage import folder as folders
from polyquant.storage import strict_json

__all__ = ["Method", "method_of", "with_older_files"]


MODELOPT = modelopt.SETTINGS


class Method(Protocol):
    """A reader of one quantization scheme."""

    def modules(self, tensors: Mapping[str, Described]) -> Iterator[str]:
        """Quantized linear modules, in file order."""

    def weight_of(
        self, module: str, tensors: Mapping[str, Described], settings: Mapping[str, Any], read: Read
    ) -> QuantizedWeight | str:
        """The weight of a module, or the name of its scheme if that is not decoded.

        settings: quantization_config. Raises InputError.
        """


def method_of(config: Mapping[str, Any]) -> tuple[Method, Mapping[str, Any]] | None:
    """The reader for this config.json, and its settings; None if there is no known method."""

    if isinstance(config.get("quantization_bit"), int) and config["quantization_bit"]:
        return chatglm, config
    if (described := mlx.settings_of(config)) is not None:
        return mlx, described
    settings = config.get("quantization_config")
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    if method == "modelopt" and not ((settings or {}).get("quant_algo") or (settings or {}).get("config_groups")):
        return None  # only the KV cache is quantized
    known: dict[str, Method] = {
        "gptq": gptq, "awq": awq, "compressed-tensors": compressed, "fp8": fp8, "fbgemm_fp8": fp8, mxfp4.METHOD: mxfp4,
        "bitsandbytes": bitsandbytes, "hqq": hqq, "torchao": torchao, "quark": quark,
        "modelopt": modelopt,
    }  # fmt: skip
    return (
        (known[method], settings)
        if isinstance(settings, dict) and isinstance(method, str) and method in known
        else None
    )


def with_older_files(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """config.json, completed from the separate files of ModelOpt and of early GPTQ and AWQ tools. Raises InputError."""
    if "quantization_config" in config:
        return config
    path = folders.member(folder, MODELOPT)
    if path is not None:
        settings = strict_json.typed(strict_json.read(path), dict, MODELOPT, file=path).get("quantization")
        if isinstance(settings, dict):
            return {**config, "quantization_config": {"quant_method": "modelopt", **settings}}
    for name, method in (("quantize_config.json", "gptq"), ("quant_config.json", "awq")):
        path = folders.member(folder, name)
        if path is not None:
            settings = strict_json.typed(strict_json.read(path), dict, name, file=path)
            return {**config, "quantization_config": {"quant_method": method, **settings}}
    return config
