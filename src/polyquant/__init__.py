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
    from polyquant.analysis.compare import compare as compare
    from polyquant.analysis.demo import demo as demo
    from polyquant.analysis.doctor import doctor as doctor
    from polyquant.analysis.evaluate import evaluate as evaluate
    from polyquant.analysis.inspect import inspect as inspect
    from polyquant.analysis.validate import explain as explain
    from polyquant.analysis.validate import validate as validate
    from polyquant.conversion.convert import convert as convert
    from polyquant.conversion.convert import plan as plan
    from polyquant.conversion.convert import quantize as quantize
    from polyquant.errors import PolyquantError as PolyquantError
    from polyquant.formats.gguf.edit import edit as edit
    from polyquant.formats.gguf.imatrix import importance as importance
    from polyquant.formats.msmodelslim.repair import repair as repair
    from polyquant.opening import look as open
    from polyquant.registry import codec as codec
    from polyquant.runtime.load import load as load

__version__ = "0.1.0"

_VERBS = {
    "PolyquantError": "polyquant.errors:PolyquantError",
    "codec": "polyquant.registry:codec",
    "compare": "polyquant.analysis.compare:compare",
    "convert": "polyquant.conversion.convert:convert",
    "demo": "polyquant.analysis.demo:demo",
    "doctor": "polyquant.analysis.doctor:doctor",
    "edit": "polyquant.formats.gguf.edit:edit",
    "evaluate": "polyquant.analysis.evaluate:evaluate",
    "explain": "polyquant.analysis.validate:explain",
    "importance": "polyquant.formats.gguf.imatrix:importance",
    "inspect": "polyquant.analysis.inspect:inspect",
    "load": "polyquant.runtime.load:load",
    "open": "polyquant.opening:look",
    "plan": "polyquant.conversion.convert:plan",
    "quantize": "polyquant.conversion.convert:quantize",
    "repair": "polyquant.formats.msmodelslim.repair:repair",
    "validate": "polyquant.analysis.validate:validate",
}

__all__ = [
    "PolyquantError", "__version__", "codec", "compare", "convert", "demo", "doctor", "edit", "evaluate", "explain", "importance", "inspect", "load", "open", "plan", "quantize", "repair", "validate",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _VERBS:
        raise AttributeError(f"module 'polyquant' has no attribute '{name}'")
    module, attribute = _VERBS[name].split(":")
    return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted(__all__)
