"""Weights of other tools' quantized checkpoints among the tensors of a Hugging Face folder: config.json says which method, one module each reads it.

    gptq                X.qweight X.qzeros X.scales [X.g_idx]                                     formats/huggingface/gptq.py
    awq                 X.qweight X.qzeros X.scales                                               formats/huggingface/awq.py
    compressed-tensors  X.weight | X.weight_packed X.weight_shape, X.weight_scale, ...            formats/huggingface/compressed.py
    fp8, fbgemm_fp8     X.weight, X.weight_scale | X.weight_scale_inv                             formats/huggingface/fp8.py
    mxfp4               X_blocks X_scales, the weight X_blocks                                    formats/huggingface/mxfp4.py
    chatglm             X.weight X.weight_scale, config.json's own key quantization_bit           formats/huggingface/chatglm.py

The first tools wrote quantize_config.json (GPTQ) or quant_config.json (AWQ) instead, ModelOpt hf_quant_config.json: read where config.json says nothing.
What none of them decodes is refused: formats/huggingface/undecoded.py.
The linear module X becomes one weight X.weight [N, K]; X.bias stays a tensor of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from polyquant.formats.huggingface import awq, chatglm, compressed, fp8, gptq, mxfp4
from polyquant.formats.huggingface.scheme import Described, Found, Read
from polyquant.storage import folder as folders
from polyquant.storage import strict_json

__all__ = ["Method", "method_of", "with_older_files"]


MODELOPT = "hf_quant_config.json"


class Method(Protocol):
    """A reader of one quantization scheme."""

    def modules(self, tensors: Mapping[str, Described]) -> Iterator[str]:
        """Linear modules that are quantized, in file order."""

    def weight_of(
        self, module: str, tensors: Mapping[str, Described], said: Mapping[str, Any], read: Read
    ) -> Found | str:
        """The weight of a module; the name of its scheme where that is not decoded. said: quantization_config. Raises InputError."""


def method_of(config: Mapping[str, Any]) -> tuple[Method, Mapping[str, Any]] | None:
    """The module that reads the weights of this config.json, and what it says; None where nothing of ours is said."""

    if isinstance(config.get("quantization_bit"), int) and config["quantization_bit"]:
        return chatglm, config
    said = config.get("quantization_config")
    method = said.get("quant_method") if isinstance(said, dict) else None
    known: dict[str, Method] = {
        "gptq": gptq, "awq": awq, "compressed-tensors": compressed, "fp8": fp8, "fbgemm_fp8": fp8, mxfp4.METHOD: mxfp4,
    }  # fmt: skip
    return (known[method], said) if isinstance(said, dict) and isinstance(method, str) and method in known else None


def with_older_files(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """config.json as if it said what ModelOpt, and the first GPTQ and AWQ tools, put into a file of their own beside it. Raises InputError."""
    if "quantization_config" in config:
        return config
    path = folders.member(folder, MODELOPT)
    if path is not None:
        said = strict_json.typed(strict_json.read(path), dict, MODELOPT, file=path).get("quantization")
        if isinstance(said, dict):
            return {**config, "quantization_config": {"quant_method": "modelopt", **said}}
    for name, method in (("quantize_config.json", "gptq"), ("quant_config.json", "awq")):
        path = folders.member(folder, name)
        if path is not None:
            said = strict_json.typed(strict_json.read(path), dict, name, file=path)
            return {**config, "quantization_config": {"quant_method": method, **said}}
    return config
