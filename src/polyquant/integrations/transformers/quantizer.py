"""The plugin: transformers asks it to prepare a model for packed weights, to name the tensors, and to finish."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import ConversionOps
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import register_quantizer
from transformers.utils import cached_file

from polyquant.codecs.trellis import Trellis
from polyquant.errors import InputError, UnsupportedError
from polyquant.formats.detect import open_checkpoint
from polyquant.formats.trellis.config import FILE as METADATA
from polyquant.integrations.transformers.config import QUANT_METHOD
from polyquant.integrations.transformers.linear import TrellisLinear, cpu_only
from polyquant.integrations.transformers.matching import Renaming, Shapes, Sources, require_match
from polyquant.integrations.transformers.saving import saves_as_v3
from polyquant.storage.safetensors import read_header
from polyquant.storage.source import Source

__all__ = ["TrellisHfQuantizer"]

PARTS = ("indices", "scales", "su", "sv", "lut")
_CHOICES = ("auto", "balanced", "balanced_low_0", "sequential")


@register_quantizer(QUANT_METHOD)
class TrellisHfQuantizer(HfQuantizer):
    """Keeps linear weights packed; or dequantizes them while they are loaded."""

    requires_calibration = False
    serialized_names = {"weight": ["weight", *(f"weight.{part}" for part in PARTS)]}  # noqa: RUF012 - the name and form that transformers asks for

    def __init__(self, quantization_config: Any, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.codecs: Mapping[str, Trellis] = {}
        self.shapes: Shapes = {}
        self.sources: Sources = {}
        self.file: Path | None = None
        self.metadata = b""
        if not self.pre_quantized:
            raise UnsupportedError(
                "this checkpoint does not say that its weights are trellis-coded", hint="polyquant.hf_adapter.load_trellis_model opens other dialects; polyquant quantize makes new ones"
            )  # fmt: skip

    # ------------------------------------------------------------ before the weights

    def update_device_map(self, device_map: Any) -> Any:
        """CPU, or a refusal; dequantized models go anywhere."""
        if device_map is None or self.quantization_config.dequantize:
            return device_map
        if isinstance(device_map, str) and device_map in _CHOICES:
            return {"": torch.device("cpu")}
        places = device_map.values() if isinstance(device_map, Mapping) else [device_map]
        for place in places:
            if str(place) != "cpu":
                raise cpu_only(place)
        return device_map

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: Sequence[str] | None = None, **_: Any
    ) -> None:
        self._read(checkpoint_files, model.config.name_or_path)
        if self.quantization_config.dequantize:
            return
        rename = Renaming(model, get_model_conversion_mapping(model))
        for name, codec in self.codecs.items():
            target, pattern = rename(name)
            path = target.removesuffix(".weight")
            module = None if target not in rename.wanted or pattern is not None else model.get_submodule(path)
            if not isinstance(module, torch.nn.Linear):
                kind = type(module).__name__ if module is not None else "merged or unknown"
                raise UnsupportedError(
                    "only weights of torch.nn.Linear stay packed", file=self.file, tensor=name, found=kind,
                    hint="load with TrellisConfig(dequantize=True)",
                )  # fmt: skip
            packed = TrellisLinear(name, module, codec, self.quantization_config.activations)
            model.set_submodule(path, packed)

    def _read(self, files: Sequence[str] | None, source: str) -> None:
        """Codecs and shapes: headers of the files, or what the configuration holds."""
        held = self.quantization_config.held
        if held is not None:
            self.codecs, self.shapes, self.file, self.metadata = held.codecs, held.shapes, held.source, held.metadata
            return
        if not files or not all(f.endswith(".safetensors") for f in files):
            raise UnsupportedError("trellis weights come from safetensors files", file=source, found=files)
        folder = Path(files[0]).parent
        if not (folder / METADATA).exists():  # a hub's cache has only what was asked for
            cached_file(source, METADATA, _raise_exceptions_for_missing_entries=False)
        self.file = folder
        if not (folder / METADATA).exists():
            raise InputError(
                "trellis weights without their metadata", file=folder / METADATA, hint="finish the download"
            )
        self.metadata = (folder / METADATA).read_bytes()
        opened = open_checkpoint(folder)
        self.codecs = {w.name: w.codec for w in opened.values() if isinstance(w.codec, Trellis)}
        self.shapes = {name: e.shape for f in files for name, e in read_header(Source(Path(f))).entries.items()}
        for name, codec in self.codecs.items():
            for part, spec in codec.specs(opened[name].shape).items():
                if self.shapes.get(f"{name}.{part}") != spec.shape:
                    raise UnsupportedError(
                        "a dialect that transformers cannot read as it lies", file=folder, tensor=f"{name}.{part}", expected=list(spec.shape),
                        found=self.shapes.get(f"{name}.{part}"), hint="use polyquant.hf_adapter.load_trellis_model, or migrate the folder first",
                    )  # fmt: skip

    def update_weight_conversions(self, weight_conversions: Sequence[Any], model: Any) -> list[Any]:
        """The last hook before weights are read: the names are settled, so they are compared here."""
        found: list[Any] = super().update_weight_conversions(weight_conversions, model)
        self.sources = require_match(model, found, self.shapes, self.file)
        return found

    def get_load_operations(self) -> dict[str, Any]:
        """How packed tensors become floats."""
        return {"dequantize": _Dequantize} if self.quantization_config.dequantize else {}

    # ------------------------------------------------------------ after the weights

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        if self.quantization_config.dequantize:
            model._weight_conversions = (
                None  # saving then knows the model's own conversions only: its weights are plain now
            )
        else:
            saves_as_v3(model, self.metadata)
        return model

    def _dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        """model.dequantize()"""
        for path, module in list(model.named_modules()):
            if isinstance(module, TrellisLinear):
                plain = torch.nn.Linear(module.in_features, module.out_features, bias=False, device="meta")
                plain.weight = torch.nn.Parameter(module.weight.dequantize().to(dtype), requires_grad=False)
                plain.bias = module.bias
                model.set_submodule(path, plain)
        vars(model).pop("save_pretrained", None)
        return model

    def is_serializable(self) -> bool:
        """save_pretrained writes the packed tensors."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Codes have no gradient."""
        return False


class _Dequantize(ConversionOps):
    """Components -> weight, one or one for each expert that the model's own converter merges afterwards."""

    def __init__(self, hf_quantizer: TrellisHfQuantizer) -> None:
        self.hf_quantizer = hf_quantizer

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], *, full_layer_name: str, model: Any, **_: Any
    ) -> dict[str, Any]:  # fmt: skip
        """{pattern of a component: [tensors]} -> {pattern of the weight: [floats]}."""
        dtype = model.get_parameter_or_buffer(full_layer_name).dtype
        out: dict[str, Any] = {}
        for pattern, tensors in input_dict.items():
            weight, dot, part = pattern.rpartition(".")
            if not dot or part not in PARTS:
                out[pattern] = [t.to(dtype) if t.is_floating_point() else t for t in tensors]
            elif part == "indices":
                parts = {p: input_dict[f"{weight}.{p}"] for p in PARTS if input_dict.get(f"{weight}.{p}")}
                names = self.hf_quantizer.sources[full_layer_name, pattern]
                out[weight] = [
                    self._one(name.removesuffix(".indices"), {p: t[i].numpy() for p, t in parts.items()}).to(dtype)
                    for i, name in enumerate(names)
                ]
        return {full_layer_name: out["weight"]} if set(out) == {"weight"} else out

    def _one(self, name: str, parts: dict[str, Any]) -> torch.Tensor:
        codec = self.hf_quantizer.codecs[name]
        return torch.from_numpy(codec.dequantize(parts, (len(parts["sv"]), len(parts["su"]))))
