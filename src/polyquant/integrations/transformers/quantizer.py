"""The plugin: transformers calls it to prepare a model for packed weights, to name the tensors, and to finish."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import ConversionOps, dot_natural_key
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import register_quantizer
from transformers.utils import cached_file

from polyquant.codecs.trellis import Trellis
from polyquant.errors import InputError, UnsupportedError
from polyquant.formats.trellis.config import FILE as METADATA
from polyquant.formats.trellis.config import WITHOUT_PLUGIN
from polyquant.integrations.transformers.config import QUANT_METHOD
from polyquant.integrations.transformers.experts import PackedExperts, expert_names, packed_experts
from polyquant.integrations.transformers.linear import DEVICE_CHOICES, TrellisLinear, on_cpu
from polyquant.integrations.transformers.matching import Renaming, Shapes, Sources, require_match
from polyquant.integrations.transformers.saving import saves_as_v3
from polyquant.integrations.transformers.undeclared import refuse_undeclared
from polyquant.opening import open_checkpoint
from polyquant.storage.safetensors import read_header
from polyquant.storage.source import Source
from polyquant.trellis.loader import require_finite

__all__ = ["TrellisHfQuantizer"]

PARTS = ("indices", "scales", "su", "sv", "lut")
refuse_undeclared()


@register_quantizer(QUANT_METHOD)
class TrellisHfQuantizer(HfQuantizer):
    """Keeps linear weights packed, or dequantizes them during loading."""

    requires_calibration = False
    serialized_names = {"weight": ["weight", *(f"weight.{part}" for part in PARTS)]}  # noqa: RUF012

    def __init__(self, quantization_config: Any, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.codecs: Mapping[str, Trellis] = {}
        self.shapes: Shapes = {}
        self.sources: Sources = {}
        self.file: Path | None = None
        self.metadata = b""
        self.unmerged: set[tuple[str, ...]] = set()
        if not self.pre_quantized:
            raise UnsupportedError(
                "this checkpoint does not declare trellis-coded weights",
                hint="polyquant.hf_adapter.load_trellis_model opens other dialects; polyquant quantize makes new ones",
            )

    # ------------------------------------------------------------ before the weights

    def update_device_map(self, device_map: Any) -> Any:
        """Return the CPU, or raise UnsupportedError; dequantized models support all devices."""
        if device_map is None or self.quantization_config.dequantize:
            return device_map
        if isinstance(device_map, str) and device_map in DEVICE_CHOICES:
            return {"": torch.device("cpu")}
        on_cpu(device_map)
        return device_map

    def update_attn_implementation(self, config: Any) -> Any:
        """Remove the entry that keeps transformers without this plugin from loading random weights.

        This is the first hook that sees the configuration.
        """
        if getattr(config, "transformers_weights", None) == WITHOUT_PLUGIN:
            del config.transformers_weights
        return config

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: Sequence[str] | None = None, **_: Any
    ) -> None:
        self._read(checkpoint_files, model.config.name_or_path)
        if self.quantization_config.dequantize:
            return
        rename = Renaming(model, get_model_conversion_mapping(model))
        experts: dict[str, list[str]] = {}
        for name, codec in self.codecs.items():
            target, pattern = rename(name)
            if pattern is not None and target in rename.wanted:
                experts.setdefault(target.rpartition(".")[0], []).append(name)
            else:
                self._pack(model, name, target if target in rename.wanted else None, codec)
        for path, names in experts.items():
            module, chosen = model.get_submodule(path), self.quantization_config.activations
            found = expert_names(module, path, names, rename, self.file)
            model.set_submodule(path, packed_experts(module, found, self.codecs, chosen))
            self.unmerged |= {tuple(c.source_patterns) for n in names if (c := rename.converter(n)) is not None}

    def _pack(self, model: Any, name: str, target: str | None, codec: Trellis) -> None:
        """Replace the linear layer whose weight is `target` by a packed one; None: the model has none."""
        path = (target or "").removesuffix(".weight")
        module = model.get_submodule(path) if target else None
        if not isinstance(module, torch.nn.Linear):
            raise UnsupportedError(
                "only weights of torch.nn.Linear stay packed", file=self.file, tensor=name,
                found="no such layer" if module is None else type(module).__name__,
                hint="load with TrellisConfig(dequantize=True)",
                            )  # fmt: skip
        shape = (module.out_features, module.in_features)
        model.set_submodule(path, TrellisLinear(name, shape, module.bias, codec, self.quantization_config.activations))

    def _read(self, files: Sequence[str] | None, source: str) -> None:
        """Read codecs and shapes, from file headers or from the configuration."""
        held = self.quantization_config.held
        if held is not None:
            self.codecs, self.shapes, self.file, self.metadata = held.codecs, held.shapes, held.source, held.metadata
            return
        if not files or not all(f.endswith(".safetensors") for f in files):
            raise UnsupportedError("trellis weights require safetensors files", file=source, found=files)
        folder = Path(files[0]).parent
        self.file = folder
        # The hub's cache holds requested files only.
        if not (folder / METADATA).exists() and folder.parent.name == "snapshots":
            cached_file(
                source,
                METADATA,
                cache_dir=folder.parents[2],
                revision=folder.name,
                _raise_exceptions_for_missing_entries=False,
            )
        if not (folder / METADATA).exists():
            raise InputError(
                "trellis weights without their metadata", file=folder / METADATA, hint="finish the download"
            )
        self.metadata = (folder / METADATA).read_bytes()
        opened = open_checkpoint(folder)
        self.codecs = {w.name: w.codec for w in opened.values() if isinstance(w.codec, Trellis)}
        self.shapes = {name: e.shape for f in files for name, e in read_header(Source(Path(f))).entries.items()}
        for name, codec in self.codecs.items():
            floats = {part: array for part, array in opened[name].arrays.items() if part != "indices"}
            require_finite(name, {part: array.view() for part, array in floats.items()}, folder)
            for part, spec in codec.specs(opened[name].shape).items():
                if self.shapes.get(f"{name}.{part}") != spec.shape:
                    raise UnsupportedError(
                        "transformers cannot read this dialect in its stored layout",
                        file=folder,
                        tensor=f"{name}.{part}",
                        expected=list(spec.shape),
                        found=self.shapes.get(f"{name}.{part}"),
                        hint="use polyquant.hf_adapter.load_trellis_model, or migrate the folder first",
                    )

    def update_weight_conversions(self, weight_conversions: Sequence[Any], model: Any) -> list[Any]:
        """Compare the names, in the last hook before weights are read, when they are final."""
        separate = [c for c in weight_conversions if tuple(c.source_patterns) not in self.unmerged]
        conversions: list[Any] = super().update_weight_conversions(separate, model)
        self.sources = require_match(model, conversions, self.shapes, self.file)
        return conversions

    def get_load_operations(self) -> dict[str, Any]:
        """Return the operations from packed tensors to floats."""
        return {"dequantize": _Dequantize} if self.quantization_config.dequantize else {}

    # ------------------------------------------------------------ after the weights

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        if self.quantization_config.dequantize:
            # Saving then uses only the model's own conversions: its weights are plain now.
            model._weight_conversions = None
        else:
            saves_as_v3(model, self.metadata)
        return model

    def _dequantize(self, model: Any, dtype: torch.dtype | str | None = None) -> Any:
        """Implement model.dequantize()."""
        # A saved model's configuration has the dtype as a string.
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        for path, module in list(model.named_modules()):
            if isinstance(module, PackedExperts):
                model.set_submodule(path, module.dequantized(dtype))
        for path, module in list(model.named_modules()):
            if isinstance(module, TrellisLinear):
                plain = torch.nn.Linear(module.in_features, module.out_features, bias=False, device="meta")
                plain.weight = torch.nn.Parameter(module.weight.dequantize().to(dtype), requires_grad=False)
                plain.bias = module.bias
                model.set_submodule(path, plain)
        vars(model).pop("save_pretrained", None)
        model._weight_conversions = None  # saving uses the model's own conversions
        return model

    def is_serializable(self) -> bool:
        """True: save_pretrained writes the packed tensors."""
        return True

    @property
    def is_trainable(self) -> bool:
        """False: codes have no gradient."""
        return False


class _Dequantize(ConversionOps):
    """Components -> weight, or one weight per expert that the model's own converter merges afterwards."""

    def __init__(self, hf_quantizer: TrellisHfQuantizer) -> None:
        self.hf_quantizer = hf_quantizer

    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        *,
        full_layer_name: str,
        model: Any,
        **_: Any,
    ) -> dict[str, Any]:
        """Convert {component pattern: [tensors]} -> {weight pattern: [floats]}, in name order: some experts may be
        plain."""
        dtype = model.get_parameter_or_buffer(full_layer_name).dtype
        weights: dict[str, dict[str, Any]] = {}
        for pattern, tensors in input_dict.items():
            weight, dot, part = pattern.rpartition(".")
            for name, tensor in zip(self.hf_quantizer.sources[full_layer_name, pattern], tensors, strict=True):
                if dot and part in PARTS:
                    weights.setdefault(weight, {}).setdefault(name.removesuffix(f".{part}"), {})[part] = tensor.numpy()
                else:
                    weights.setdefault(pattern, {})[name] = tensor
        out = {
            weight: [self._float(name, by_name[name]).to(dtype) for name in sorted(by_name, key=dot_natural_key)]
            for weight, by_name in weights.items()
        }
        return {full_layer_name: out["weight"]} if set(out) == {"weight"} else out

    def _float(self, name: str, stored: Any) -> Any:
        """Return a plain tensor unchanged, or decode the parts of a packed one."""
        if not isinstance(stored, dict):
            return stored
        shape = (len(stored["sv"]), len(stored["su"]))
        return torch.from_numpy(self.hf_quantizer.codecs[name].dequantize(stored, shape))
