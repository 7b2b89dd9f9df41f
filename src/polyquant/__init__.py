"""Open, check, compare, convert, quantize and run LLM weights in any supported format.

    import polyquant as pq
    weights = pq.open("model.gguf")                 # mapping: name -> Weight
    w = weights["blk.0.attn_q.weight"].dequantize() # float32 [N, K]
    pq.convert("model/", "model.gguf", to="gguf", codec="q4_k")

Names are resolved on first use, so that `import polyquant` stays light. docs/python.md describes all of them.
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # type checkers take it as true; importing `typing` would be most of the time of this import
if TYPE_CHECKING:
    from typing import Any

    from polyquant.analysis.catalogue import CodecInfo as CodecInfo
    from polyquant.analysis.catalogue import FormatInfo as FormatInfo
    from polyquant.analysis.catalogue import RecipeInfo as RecipeInfo
    from polyquant.analysis.catalogue import codecs as codecs
    from polyquant.analysis.catalogue import formats as formats
    from polyquant.analysis.catalogue import recipes as recipes
    from polyquant.analysis.certify import Certificate as Certificate
    from polyquant.analysis.certify import certify as certify
    from polyquant.analysis.checksum import Checksums as Checksums
    from polyquant.analysis.checksum import checksum as checksum
    from polyquant.analysis.compare import Comparison as Comparison
    from polyquant.analysis.compare import compare as compare
    from polyquant.analysis.demo import Outcome as Outcome
    from polyquant.analysis.demo import demo as demo
    from polyquant.analysis.demo import demo_model as demo_model
    from polyquant.analysis.doctor import Check as Check
    from polyquant.analysis.doctor import doctor as doctor
    from polyquant.analysis.evaluate import Evaluation as Evaluation
    from polyquant.analysis.evaluate import evaluate as evaluate
    from polyquant.analysis.explain import explain as explain
    from polyquant.analysis.inspect import Inspection as Inspection
    from polyquant.analysis.inspect import inspect as inspect
    from polyquant.analysis.report.figures import Figure as Figure
    from polyquant.analysis.report.figures import ReportPage as ReportPage
    from polyquant.analysis.report.figures import report as report
    from polyquant.analysis.sweep.results import Sweep as Sweep
    from polyquant.analysis.sweep.run import sweep as sweep
    from polyquant.analysis.validate import validate as validate
    from polyquant.conversion.convert import convert as convert
    from polyquant.conversion.convert import plan as plan
    from polyquant.conversion.convert import quantize as quantize
    from polyquant.conversion.merge import merge as merge
    from polyquant.conversion.report import Report as Report
    from polyquant.conversion.save import save as save
    from polyquant.conversion.steps import Plan as Plan
    from polyquant.errors import CodecError as CodecError
    from polyquant.errors import InputError as InputError
    from polyquant.errors import PlanError as PlanError
    from polyquant.errors import PolyquantError as PolyquantError
    from polyquant.errors import RemoteError as RemoteError
    from polyquant.errors import UnknownNameError as UnknownNameError
    from polyquant.errors import UnsupportedError as UnsupportedError
    from polyquant.formats.gguf.edit import Edited as Edited
    from polyquant.formats.gguf.edit import edit as edit
    from polyquant.formats.gguf.imatrix import Importance as Importance
    from polyquant.formats.gguf.imatrix import importance as importance
    from polyquant.formats.msmodelslim.repair import Repaired as Repaired
    from polyquant.formats.msmodelslim.repair import repair as repair
    from polyquant.formats.steps import Progress as Progress
    from polyquant.opening import look as open
    from polyquant.packing.listing import Stored as Stored
    from polyquant.packing.listing import stored as stored
    from polyquant.packing.pack import pack as pack
    from polyquant.packing.request import Packed as Packed
    from polyquant.recipes.recipe import Rule as Rule
    from polyquant.registry import codec as codec
    from polyquant.runtime.generate import Generation as Generation
    from polyquant.runtime.generate import Token as Token
    from polyquant.runtime.generate_batch import Answer as Answer
    from polyquant.runtime.load import load as load
    from polyquant.runtime.model import Model as Model
    from polyquant.tables import Row as Row
    from polyquant.tables import Tabular as Tabular
    from polyquant.types import Checkpoint as Checkpoint
    from polyquant.types import Codec as Codec
    from polyquant.types import Finding as Finding
    from polyquant.types import Findings as Findings
    from polyquant.types import Kind as Kind
    from polyquant.types import Meta as Meta
    from polyquant.types import Severity as Severity
    from polyquant.types import Weight as Weight

__version__ = "0.1.0"

_MODULES = {
    "analysis.catalogue": "CodecInfo FormatInfo RecipeInfo",
    "analysis.certify": "Certificate certify",
    "analysis.checksum": "Checksums checksum",
    "analysis.compare": "Comparison compare",
    "analysis.demo": "Outcome demo demo_model",
    "analysis.doctor": "Check doctor",
    "analysis.evaluate": "Evaluation evaluate",
    "analysis.inspect": "Inspection inspect",
    "analysis.explain": "explain",
    "analysis.report.figures": "Figure ReportPage report",
    "analysis.sweep.results": "Sweep",
    "analysis.sweep.run": "sweep",
    "analysis.validate": "validate",
    "conversion.convert": "convert plan quantize",
    "conversion.report": "Report",
    "conversion.merge": "merge",
    "conversion.save": "save",
    "conversion.steps": "Plan",
    "errors": "CodecError InputError PlanError PolyquantError RemoteError UnknownNameError UnsupportedError",
    "formats.gguf.edit": "Edited edit",
    "formats.gguf.imatrix": "Importance importance",
    "formats.msmodelslim.repair": "Repaired repair",
    "formats.steps": "Progress",
    "packing.listing": "Stored stored",
    "packing.pack": "pack",
    "packing.request": "Packed",
    "recipes.recipe": "Rule",
    "registry": "codec",
    "runtime.generate": "Generation Token",
    "runtime.generate_batch": "Answer",
    "runtime.load": "load",
    "runtime.model": "Model",
    "findings": "Finding Findings Severity",
    "metadata": "Kind Meta",
    "tables": "Row Tabular",
    "types": "Checkpoint Codec Weight",
}
"""Module -> its public names; `open` is defined under a different name."""
_PLACES = {name: (module, name) for module, names in _MODULES.items() for name in names.split()}
_PLACES["open"] = ("opening", "look")

_CALLABLE = ("codecs", "formats", "recipes")
"""Packages that are also functions (callable_package.py)."""

__all__ = [
    "Answer", "Certificate", "Check", "Checkpoint", "Checksums", "Codec", "CodecError", "CodecInfo", "Comparison",
    "Edited", "Evaluation", "Figure", "Finding", "Findings", "FormatInfo", "Generation", "Importance", "InputError",
    "Inspection", "Kind", "Meta", "Model", "Outcome", "Packed", "Plan", "PlanError", "PolyquantError", "Progress",
    "RecipeInfo", "RemoteError", "Repaired", "Report", "ReportPage", "Row", "Rule", "Severity", "Stored", "Sweep",
    "Tabular", "Token", "UnknownNameError", "UnsupportedError", "Weight", "__version__", "certify", "checksum",
    "codec", "codecs", "compare", "convert", "demo", "demo_model", "doctor", "edit", "evaluate", "explain",
    "formats", "importance", "inspect", "load", "merge", "open", "pack", "plan", "quantize", "recipes", "repair",
    "report", "save", "stored", "sweep", "validate",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _CALLABLE:
        return import_module(f"polyquant.{name}")
    if name not in _PLACES:
        raise AttributeError(f"module 'polyquant' has no attribute '{name}'")
    module, attribute = _PLACES[name]
    return getattr(import_module(f"polyquant.{module}"), attribute)


def __dir__() -> list[str]:
    return sorted(__all__)
