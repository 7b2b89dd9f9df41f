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
    from polyquant.errors import PolyquantError as PolyquantError
    from polyquant.formats.detect import look as open
    from polyquant.formats.gguf.edit import edit as edit
    from polyquant.pipeline.compare import compare as compare
    from polyquant.pipeline.convert import convert as convert
    from polyquant.pipeline.convert import plan as plan
    from polyquant.pipeline.convert import quantize as quantize
    from polyquant.pipeline.demo import demo as demo
    from polyquant.pipeline.doctor import doctor as doctor
    from polyquant.pipeline.inspect import inspect as inspect
    from polyquant.pipeline.repair import repair as repair
    from polyquant.pipeline.validate import explain as explain
    from polyquant.pipeline.validate import validate as validate
    from polyquant.registry import codec as codec
    from polyquant.runtime.evaluate import evaluate as evaluate
    from polyquant.runtime.load import load as load

__version__ = "0.1.0"

_VERBS = {
    "PolyquantError": "polyquant.errors:PolyquantError",
    "codec": "polyquant.registry:codec",
    "compare": "polyquant.pipeline.compare:compare",
    "convert": "polyquant.pipeline.convert:convert",
    "demo": "polyquant.pipeline.demo:demo",
    "doctor": "polyquant.pipeline.doctor:doctor",
    "edit": "polyquant.formats.gguf:edit",
    "evaluate": "polyquant.runtime.evaluate:evaluate",
    "explain": "polyquant.pipeline.validate:explain",
    "inspect": "polyquant.pipeline.inspect:inspect",
    "load": "polyquant.runtime.load:load",
    "open": "polyquant.formats.detect:look",
    "plan": "polyquant.pipeline.convert:plan",
    "quantize": "polyquant.pipeline.convert:quantize",
    "repair": "polyquant.pipeline.repair:repair",
    "validate": "polyquant.pipeline.validate:validate",
}

__all__ = [
    "PolyquantError", "__version__", "codec", "compare", "convert", "demo", "doctor", "edit", "evaluate", "explain", "inspect", "load", "open", "plan", "quantize", "repair", "validate",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _VERBS:
        raise AttributeError(f"module 'polyquant' has no attribute '{name}'")
    module, attribute = _VERBS[name].split(":")
    return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted(__all__)
