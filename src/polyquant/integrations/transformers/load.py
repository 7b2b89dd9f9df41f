"""load_trellis_model: load a Trellis folder of any dialect as a transformers model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from polyquant.codecs.trellis import Trellis
from polyquant.errors import InputError, UnsupportedError
from polyquant.formats.trellis.config import config_entry, config_text
from polyquant.formats.trellis.target import method_of, origin
from polyquant.integrations.transformers.config import QUANT_METHOD, TensorsInMemory, TrellisConfig
from polyquant.integrations.transformers.linear import on_cpu
from polyquant.integrations.transformers.matching import refuse_report
from polyquant.integrations.transformers.placing import float_tensor
from polyquant.integrations.transformers.quantizer import TrellisHfQuantizer
from polyquant.opening import open_checkpoint
from polyquant.runtime.load import Activations
from polyquant.trellis.loader import as_trellis
from polyquant.types import Action, Checkpoint, TensorSpec, TrellisCodes

__all__ = ["TrellisHfQuantizer", "load_trellis_model"]

_HUB = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token", "trust_remote_code")
"""Options that locate a configuration."""


def load_trellis_model(
    path: str | os.PathLike[str],
    *,
    torch_dtype: Any = "auto",
    device_map: Any = "auto",
    dequantize: bool = False,
    activations: Activations = "float",
    repair: bool = False,
    **options: Any,
) -> Any:
    """Load a causal language model whose linear layers keep their packed weights.

    path: a folder, Trellis v3 or any dialect (converted to v3's axes in memory), or the hub name of a model written by
    polyquant.
    torch_dtype: of activations and float weights; "auto" as stored.
    device_map: "auto" and "cpu" select the CPU, which packed weights require; with dequantize=True any value of
    transformers.
    activations: "float" or "int8", see TrellisConfig.
    repair: decode Metal Marlin's files as their quantizer intended.
    options: other options of from_pretrained, e.g. attn_implementation.

    Raises InputError if a tensor is missing, unexpected or misshapen, and UnsupportedError; in both cases nothing is
    loaded.
    """
    options["dtype"] = options.pop("dtype", torch_dtype)
    if not dequantize or device_map == "auto":
        on_cpu(device_map)
        device_map = None
    if device_map is not None:
        options["device_map"] = device_map
    if not Path(path).exists():
        if repair:
            raise InputError("repair requires a folder", file=path)
        return _by_plugin(path, dequantize, activations, options)
    checkpoint = open_checkpoint(path, repair=repair)
    if not repair and _names_plugin(checkpoint.config.get("quantization_config")):
        return _by_plugin(path, dequantize, activations, options)
    return _from_memory(checkpoint, dequantize=dequantize, activations=activations, options=options)


def _by_plugin(path: str | os.PathLike[str], dequantize: bool, activations: Activations, options: Any) -> Any:
    """Load like AutoModelForCausalLM, with the loading options in the configuration."""
    config = transformers.AutoConfig.from_pretrained(path, **{k: options[k] for k in _HUB if k in options})
    entry = getattr(config, "quantization_config", None)
    if not _names_plugin(entry):
        raise UnsupportedError("not a model written by polyquant", file=path, hint="download it and pass the folder")
    chosen = TrellisConfig(dequantize, activations).get_loading_attributes()
    config.quantization_config = {**(entry or {}), **chosen}
    return transformers.AutoModelForCausalLM.from_pretrained(path, config=config, **options)


def _names_plugin(entry: Any) -> bool:
    """True if config.json selects the plugin, so that transformers can read the files itself."""
    return isinstance(entry, Mapping) and entry.get("quant_method") == QUANT_METHOD


def _from_memory(checkpoint: Checkpoint, *, dequantize: bool, activations: Activations, options: dict[str, Any]) -> Any:
    """Load the model from the tensors that transformers would have read from a v3 folder."""
    if not any(w.codec.form is TrellisCodes for w in checkpoint.values()):
        raise UnsupportedError("no trellis weights in this folder", file=checkpoint.path, found=checkpoint.format)
    if not checkpoint.config:
        raise InputError("transformers requires a config.json", file=checkpoint.path)
    config = transformers.AutoConfig.from_pretrained(checkpoint.path)
    for entry in ("quantization_config", "transformers_weights"):  # they describe files that transformers does not see
        if hasattr(config, entry):
            delattr(config, entry)
    state: dict[str, torch.Tensor] = {}
    packed: list[TensorSpec] = []
    for name, weight in checkpoint.items():
        if weight.codec.form is not TrellisCodes or dequantize:
            state[name] = float_tensor(weight)
            continue
        trellis = as_trellis(weight, file=checkpoint.path)
        packed.append(TensorSpec(name, trellis.shape, trellis.codec))
        state |= {f"{name}.{part}": torch.from_numpy(array) for part, array in trellis.parts.items()}
    if not dequantize:
        config.quantization_config = {**_described(checkpoint, packed, state), "activations": activations}
    kind = transformers.AutoModelForCausalLM._model_mapping[type(config)]
    model, report = kind.from_pretrained(None, config=config, state_dict=state, output_loading_info=True, **options)
    refuse_report(model, set(report["missing_keys"]), set(report["unexpected_keys"]), checkpoint.path)
    return model


def _described(checkpoint: Checkpoint, packed: list[TensorSpec], state: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return the config.json entries of the folder as Trellis v3."""
    method = method_of(checkpoint, [Action.TRANSCODE], calibrated=False)
    origins = {t.name: origin(checkpoint, checkpoint[t.name], Action.TRANSCODE) for t in packed}
    metadata, _ = config_text(packed, origins, method)
    codecs = {t.name: t.codec for t in packed if isinstance(t.codec, Trellis)}
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    return {**config_entry(packed, method), "held": TensorsInMemory(codecs, shapes, checkpoint.path, metadata)}
