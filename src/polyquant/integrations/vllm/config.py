"""vLLM's quantization configuration of a Trellis folder: the codec of each linear layer, from the headers of its files.

vLLM fuses q, k and v, and gate and up, into one layer; the folder has one weight per matrix, and they stay separate.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from polyquant.codecs.trellis import Trellis
from polyquant.errors import InputError, UnsupportedError
from polyquant.integrations.vllm.linear import TrellisLinearMethod
from polyquant.opening import open_checkpoint

__all__ = ["METHOD", "TrellisConfig"]

METHOD = "polyquant_trellis"
"""`quant_method` in config.json of the folders that polyquant writes."""


@register_quantization_config(METHOD)
class TrellisConfig(QuantizationConfig):
    """codecs: weight -> codec, under vLLM's names. folder: None until vLLM names the model."""

    def __init__(self) -> None:
        super().__init__()
        self.codecs: Mapping[str, Trellis] = {}
        self.folder: Path | None = None

    def get_name(self) -> str:
        """Return the name of the method."""
        return METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Return the dtypes of activations."""
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """Return 0: on a GPU the weights are dequantized, which needs no special instructions."""
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Return []: config.json has the entry."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> TrellisConfig:
        """Return a configuration; `maybe_update_config` reads the codecs."""
        return cls()

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Read the codecs of a local folder. Raises InputError, and UnsupportedError for other dialects."""
        self.folder = Path(model_name)
        if not self.folder.is_dir():
            raise InputError(
                "Trellis weights in vLLM require a local folder", file=model_name, hint="download the model first"
            )
        opened = open_checkpoint(self.folder)
        self.codecs = {w.name: w.codec for w in opened.values() if isinstance(w.codec, Trellis)}
        if not self.codecs:
            raise UnsupportedError(
                "vLLM loads Trellis v3 as polyquant writes it", file=self.folder, found=opened.format,
                hint="rewrite the folder with polyquant convert --to trellis-v3",
            )  # fmt: skip

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Rename the weights as the model does."""
        self.codecs = hf_to_vllm_mapper.apply_dict(dict(self.codecs))

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """Return the method of a layer; None for other modules than linear layers.

        Raises UnsupportedError for quantized weights in other modules, and for a fused layer of which only a part is
        quantized.
        """
        inside = [name for name in self.codecs if name.startswith(f"{prefix}.")]
        if not isinstance(layer, LinearBase):
            if inside:
                raise UnsupportedError(
                    "only linear layers can have Trellis weights in vLLM", file=self.folder, tensor=inside[0],
                    found=type(layer).__name__, hint="keep these weights as floats: polyquant quantize --keep",
                )  # fmt: skip
            return None
        parent, _, leaf = prefix.rpartition(".")
        members = [f"{parent}.{m}.weight".lstrip(".") for m in self.packed_modules_mapping.get(leaf, ())]
        fused = f"{prefix}.weight"
        names = members if members and fused not in self.codecs else [fused]
        quantized = [name for name in names if name in self.codecs]
        if not quantized:
            return UnquantizedLinearMethod()
        if len(quantized) < len(names):
            raise UnsupportedError(
                f"vLLM fuses {', '.join(m.split('.')[-2] for m in names)}: quantize all of them or none",
                file=self.folder,
                tensor=next(name for name in names if name not in self.codecs),
            )
        return TrellisLinearMethod({name: self.codecs[name] for name in names}, self.folder)
