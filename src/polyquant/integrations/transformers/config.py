"""transformers' `quantization_config`: the entry of config.json, and the user's loading options."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers.quantizers import auto
from transformers.quantizers.auto import register_quantization_config
from transformers.utils.quantization_config import QuantizationConfigMixin

from polyquant.codecs.trellis import Trellis
from polyquant.errors import UnsupportedError
from polyquant.runtime.load import Activations

__all__ = ["QUANT_METHOD", "TensorsInMemory", "TrellisConfig"]

QUANT_METHOD = "polyquant_trellis"


class TensorsInMemory:
    """Tensors in memory instead of files. codecs: weight -> codec; shapes: tensor -> shape; source: their origin;
    metadata: their quantization_config.json."""

    def __init__(
        self, codecs: Mapping[str, Trellis], shapes: Mapping[str, tuple[int, ...]], source: Path, metadata: bytes
    ) -> None:
        self.codecs, self.shapes, self.source, self.metadata = codecs, shapes, source, metadata

    def __deepcopy__(self, memo: Any) -> TensorsInMemory:
        return self  # transformers copies its configurations repeatedly


@register_quantization_config(QUANT_METHOD)
class TrellisConfig(QuantizationConfigMixin):
    """Options of loading: `from_pretrained(..., quantization_config=TrellisConfig(dequantize=True))`.

    dequantize: float layers instead of packed ones. activations: "float" multiplies packed weights in float32, as
    exactly as dequantized ones; "int8" rounds each block of 32 inputs, which is faster. All other options come from
    config.json, unchanged.
    """

    def __init__(
        self,
        dequantize: bool = False,
        activations: Activations = "float",
        held: TensorsInMemory | None = None,
        **described: Any,
    ) -> None:
        if activations not in ("float", "int8"):
            raise UnsupportedError("unknown activations", expected="float or int8", found=activations)
        self.quant_method = QUANT_METHOD
        self.dequantize, self.activations = dequantize, activations
        self.held = held
        self.described = {key: value for key, value in described.items() if key != "quant_method"}

    def get_loading_attributes(self) -> dict[str, Any]:
        """Return the user's options that override config.json."""
        return {"dequantize": self.dequantize, "activations": self.activations}

    def to_dict(self) -> dict[str, Any]:
        """Return the entry of config.json."""
        return {"quant_method": QUANT_METHOD, **self.described}

    def __iter__(self) -> Any:
        return iter(self.to_dict().items())


# Only configurations in this tuple may add options for a quantized checkpoint; transformers silently drops others.
auto.LOADING_ATTRIBUTES_CONFIG_TYPES += (TrellisConfig,)
