"""Read the description file: a strict JSON object from tensor names to types, and some keys about the model.

    {"model_quant_type": "W8A8", "kv_cache_type": "C8", "version": "1.0.0", "group_size": 32,
     "model.layers.0.self_attn.k_proj.weight": "W8A8", "model.layers.0.self_attn.k_proj.kv_cache_scale": "C8", ...}

Tensor names contain a dot; the keys about the model do not. `metadata` and `optional` (v1) are objects. The tool gives
tensors of the cache the type C8; the document's example gives them the type of their linear layer, which is equivalent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polyquant.codecs.msmodelslim import TYPES
from polyquant.errors import InputError
from polyquant.storage import strict_json

__all__ = ["CACHE_PARTS", "FLOAT", "KINDS", "PARTS", "Description", "parse", "read", "split"]

FLOAT = "FLOAT"
KINDS: dict[str, str] = {word: kind for kind, word in TYPES.items()}
"""Type in the description -> first part of the codec's name."""
PARTS = (
    "weight",
    "weight_scale",
    "weight_offset",
    "weight_scale_second",
    "weight_offset_second",
    "input_scale",
    "input_offset",
    "quant_bias",
    "deq_scale",
    "scale_bias",
)
"""Possible tensors of a quantized linear layer."""
CACHE_PARTS = ("kv_cache_scale", "kv_cache_offset")


@dataclass(frozen=True, slots=True)
class Description:
    """The parsed description. types: tensor -> type; general: the keys about the model."""

    types: Mapping[str, str] = field(default_factory=dict)
    general: Mapping[str, Any] = field(default_factory=dict)

    @property
    def group_size(self) -> int:
        """Columns per scale if the file states it; 0 otherwise."""
        size = self.general.get("group_size")
        return size if isinstance(size, int) and not isinstance(size, bool) and size > 0 else 0


def read(path: Path) -> Description:
    """Read the description from a file. Raises InputError."""
    return _parted(strict_json.read(path, strict_json.INDEX), path)


def parse(data: bytes, *, file: object = None) -> Description:
    """Parse the description from bytes. Raises InputError."""
    return _parted(strict_json.parse(data, strict_json.INDEX, file=file), file)


def _parted(content: Any, file: object) -> Description:
    members = strict_json.typed(content, dict, "description", file=file)
    types: dict[str, str] = {}
    for name, word in members.items():
        if "." not in name:
            continue
        if not isinstance(word, str):
            raise InputError(
                "the description has no valid type for a tensor",
                file=file,
                tensor=name,
                expected='a string such as "W8A8"',
                found=word,
            )
        types[name] = word
    return Description(types, {k: v for k, v in members.items() if "." not in k})


def split(name: str) -> tuple[str, str]:
    """(layer, part) of a tensor's name."""
    layer, _, part = name.rpartition(".")
    return layer, part
