"""polyquant opens, checks, compares, converts and quantizes LLM weights, whatever format they lie in.

    import polyquant as pq
    weights = pq.open("model.gguf")                 # mapping: name -> Weight
    w = weights["blk.0.attn_q.weight"].dequantize() # float32 [N, K]
    pq.convert("model/", "model.gguf", to="gguf", codec="q4_k")

Names are resolved on first use, so that `import polyquant` stays light.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polyquant.registry import codec as codec

__version__ = "0.1.0"

_VERBS = {
    "codec": "polyquant.registry",
}

__all__ = ["__version__", "codec"]


def __getattr__(name: str) -> Any:
    if name in _VERBS:
        return getattr(import_module(_VERBS[name]), name)
    raise AttributeError(f"module 'polyquant' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(__all__)
