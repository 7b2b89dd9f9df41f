"""Facts of a model that configs of stores repeat: family, parameters, file type."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from polyquant.types import Checkpoint

__all__ = ["Facts", "counted", "facts_of"]

_FILE_TYPES = {
    1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S", 12: "Q3_K_M",
    13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS",
    21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S",
    29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4_MOE", 39: "NVFP4",
    40: "Q1_0",
}  # fmt: skip
"""general.file_type -> name, as fs/ggml/type.go of ollama fb30760 numbers them. It reads 0, which is F32, as absent."""
UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Facts:
    """family: the architecture's name; weights: number of parameters; file_type: "Q4_K_M", ... or "unknown"; kind:
    general.type.
    """

    family: str
    weights: int
    file_type: str
    kind: str
    chat_template: str | None
    dialect: str


def facts_of(checkpoint: Checkpoint, metadata: Mapping[str, Any]) -> Facts:
    """Return the facts of a GGUF checkpoint. metadata: its keys."""
    number = metadata.get("general.file_type")
    template = metadata.get("tokenizer.chat_template")
    family = metadata.get("general.architecture")
    kind = metadata.get("general.type")
    return Facts(
        family if isinstance(family, str) else UNKNOWN,
        sum(math.prod(w.shape) for w in checkpoint.values()),
        _FILE_TYPES.get(number, UNKNOWN) if isinstance(number, int) else UNKNOWN,
        kind if isinstance(kind, str) else UNKNOWN,
        template if isinstance(template, str) else None,
        checkpoint.dialect.name if checkpoint.dialect is not None else "mainline",
    )


def counted(n: int) -> str:
    """A number of parameters as Ollama shows it (format/format.go, HumanNumber): "8B", "1.2B", "134.52M", "54K"."""
    for unit, letter, digits in ((10**9, "B", 1), (10**6, "M", 2)):
        if n >= unit:
            return f"{n // unit}{letter}" if n % unit == 0 else f"{n / unit:.{digits}f}{letter}"
    return f"{n / 1000:.0f}K" if n >= 1000 else str(n)
