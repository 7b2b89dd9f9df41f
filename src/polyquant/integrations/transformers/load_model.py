"""load_model: load a checkpoint of any format as a transformers model that keeps its quantized weights packed."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from types import MethodType
from typing import Any

import torch
import transformers

from polyquant.errors import UnsupportedError
from polyquant.integrations.transformers.linear import on_cpu
from polyquant.integrations.transformers.matching import refuse_report
from polyquant.integrations.transformers.placing import METHOD, Placing, report
from polyquant.integrations.transformers.source import config_folder
from polyquant.opening import detect, open_sound
from polyquant.ops import native
from polyquant.runtime.load import Activations
from polyquant.types import Checkpoint

__all__ = ["load_model", "load_tokenizer"]

_log = logging.getLogger("polyquant")


def load_model(
    path: str | os.PathLike[str],
    *,
    dtype: Any = "auto",
    device_map: Any = None,
    auto_class: Any = None,
    dequantize: bool = False,
    activations: Activations = "int8",
    ternary_layout: str | None = None,
    dialect: str | None = None,
    tile: tuple[int, int, int] | None = None,
    **options: Any,
) -> Any:
    """Load a GGUF file or a folder of any format as a transformers model whose quantized weights stay packed.

    dtype: of activations and float weights; "auto" is that of config.json, or bfloat16 for a quantized GGUF file.
    device_map: "auto" and "cpu" select the CPU, the only device of packed weights; with dequantize=True any value of
    transformers.
    auto_class: the class that selects the model, AutoModelForCausalLM by default; AutoModel for embeddings.
    dequantize: float layers instead of packed ones.
    activations: "int8" rounds the inputs of packed weights, as polyquant.load does; "float" multiplies in float32,
    which is slower.
    ternary_layout, dialect, tile: see polyquant.open. options: other options of from_pretrained.

    Raises InputError if a tensor is missing, unexpected or misshapen, and UnsupportedError; in both cases nothing is
    loaded.
    """
    if activations not in ("float", "int8"):
        raise UnsupportedError("unknown activations", expected="float or int8", found=activations)
    if not dequantize:
        on_cpu(device_map)
    checkpoint = _opened(path, ternary_layout=ternary_layout, dialect=dialect, tile=tile)
    auto_class = auto_class or transformers.AutoModelForCausalLM
    with config_folder(checkpoint) as (folder, source):
        for warning in source.warnings:
            _log.warning("%s", warning)
        config = _configuration(folder, path)
        if type(config) not in auto_class._model_mapping:
            raise UnsupportedError(
                f"{auto_class.__name__} has no model for this configuration", file=path, found=type(config).__name__
            )
        state: dict[str, torch.Tensor] = {}
        placing = Placing(source, state, dequantize=dequantize)
        config.quantization_config = {"quant_method": METHOD, "placing": placing, "activations": activations}
        if dequantize and device_map is not None:
            options["device_map"] = device_map
        model, found = auto_class._model_mapping[type(config)].from_pretrained(
            None, config=config, state_dict=state, output_loading_info=True, dtype=_dtype(dtype, config), **options
        )
        refuse_report(model, set(found["missing_keys"]), set(found["unexpected_keys"]), checkpoint.path)
        if model.can_generate() and (folder / "generation_config.json").is_file():
            model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    report(placing, model)
    if dequantize:
        model.hf_quantizer = None
        del model.config.quantization_config
    else:
        model.save_pretrained = MethodType(_refuse_saving, model)
        if device_map is not None:
            _say_where(model, device_map, placing.packed)
    return model


def _refuse_saving(model: Any, *_: Any, **__: Any) -> None:
    raise UnsupportedError(
        "transformers cannot save packed weights", found=type(model).__name__,
        hint="use polyquant convert on the file, or load it with dequantize=True",
    )  # fmt: skip


def load_tokenizer(path: str | os.PathLike[str], **options: Any) -> Any:
    """Load the tokenizer of a GGUF file or a folder with AutoTokenizer. Raises InputError, UnsupportedError."""
    with config_folder(_opened(path)) as (folder, _):
        return transformers.AutoTokenizer.from_pretrained(folder, **{"trust_remote_code": False, **options})


def _opened(path: str | os.PathLike[str], **options: Any) -> Checkpoint:
    return open_sound(detect(path)[0], path, options)


def _configuration(folder: Path, path: object) -> Any:
    """Return the configuration without entries that describe files. Raises UnsupportedError for an unknown model."""
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except ValueError as problem:
        first, _, _ = str(problem).partition(". ")
        raise UnsupportedError(
            f"transformers cannot read this configuration: {first}", file=path,
            hint="polyquant run and polyquant.load do not need transformers",
        ) from None  # fmt: skip
    for entry in ("quantization_config", "transformers_weights"):
        if hasattr(config, entry):
            delattr(config, entry)
    return config


def _dtype(chosen: Any, config: Any) -> Any:
    """Return the dtype that "auto" selects: that of the configuration, else float32."""
    if chosen != "auto":
        return chosen
    return getattr(config, "dtype", None) or torch.float32


def _say_where(model: Any, device_map: Any, packed: int) -> None:
    model.hf_device_map = {"": "cpu"}
    kernels = "native kernels" if native.available() else "numpy: the native module is missing"
    idle = " although torch has an accelerator" if torch.accelerator.is_available() else ""
    _log.warning(
        "device_map=%r: the model runs on the CPU%s; %d packed weights (%s)", device_map, idle, packed, kernels
    )
