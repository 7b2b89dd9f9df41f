"""Check a checkpoint as a model: whether it runs (runtime/check.py), and whether it can be translated to the other
naming scheme. `run` and `convert` use the same code, so that they agree with `validate`.
"""

from __future__ import annotations

from collections.abc import Iterator

from polyquant.architectures.find import of_config, of_metadata
from polyquant.architectures.language_model import language_model
from polyquant.architectures.translate import to_gguf, to_hf
from polyquant.errors import PolyquantError, UnsupportedError, printable
from polyquant.runtime.check import model_problems
from polyquant.types import Checkpoint, Finding, Severity

__all__ = ["CODES", "model_findings"]

CODES = {
    "MOD002": "The tensors, the hyper-parameters or the layers do not fit each other: `polyquant run` and `convert` "
    "reject the model with this message, and so does any other runtime that checks. Usually an interrupted or wrong "
    "conversion, an edited config.json, or the config.json of another model.",
    "MOD003": "polyquant does not run this architecture or this variant of it, so only its tensors were checked. "
    "`polyquant architectures` lists what runs.",
    "MOD004": "The tokenizer files or the tokenizer's metadata are broken: text cannot be encoded. Copy them again "
    "from the source of the model.",
    "MOD005": "The recommended sampling (generation_config.json, or general.sampling.* in GGUF) is broken: `polyquant "
    "run` rejects it. Correct or remove it.",
    "MOD006": "The model cannot be translated to the other naming scheme (Hugging Face's or GGUF's), so `polyquant "
    "convert` rejects it with this message.",
}
"""Code -> explanation."""


def model_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield findings about the whole model. None for files that name no architecture."""
    problems = dict(model_problems(checkpoint))
    for code, problem in problems.items():
        yield _finding(code, problem)
    if "MOD002" not in problems and (untranslatable := _untranslatable(checkpoint)) is not None:
        yield _finding("MOD006", untranslatable)


def _untranslatable(checkpoint: Checkpoint) -> PolyquantError | None:
    """The error of the translation to the other naming scheme; None for an unknown architecture."""
    model = language_model(checkpoint)
    try:
        if model.naming == "gguf" and of_metadata(model.metadata) is not None:
            to_hf(model)
        elif model.naming == "hf" and of_config(model.config) is not None:
            to_gguf(model)
    except UnsupportedError:
        return None
    except PolyquantError as problem:
        return problem
    return None


def _finding(code: str, problem: PolyquantError) -> Finding:
    details = (("expected", problem.expected), ("found", problem.found))
    shown = [f"{word} {printable(value)}" for word, value in details if value is not None]
    message = problem.message + (f" ({', '.join(shown)})" if shown else "")
    tensor = None if problem.tensor is None else str(problem.tensor)
    if isinstance(problem, UnsupportedError):
        return Finding("MOD003", Severity.WARNING, f"not checked whether it runs: {message}", tensor)
    return Finding(code, Severity.ERROR, message, tensor)
