"""Options for writing a Hugging Face folder."""

from __future__ import annotations

from dataclasses import dataclass

from polyquant.formats.sizes import shard_bytes as parse_size
from polyquant.options import option

__all__ = ["HuggingFaceOptions"]


@dataclass(frozen=True, slots=True)
class HuggingFaceOptions:
    """Options for writing."""

    shard_bytes: int | None = option(
        help="Maximum size of a shard, e.g. 2GB.", flag="--shard-size", metavar="SIZE", parse=parse_size, shown="5GB"
    )
    scheme: str | None = option(
        flag="", help="Quantization scheme of the folder: --to compressed-tensors, gptq, awq, ... select one."
    )
    calibration: str | None = option(
        metavar="FILE|self",
        help="Quantize with the least error on this text (GPTQ); self: text that the model generates.",
    )
    effort: str | None = option(
        choices=("default", "max"),
        shown="default",
        help="max: scale inputs before the search (AWQ); needs --calibration.",
    )
    single_file: bool = option(
        False, type=bool, flag="", help="One .safetensors file, without config.json and the small files."
    )
