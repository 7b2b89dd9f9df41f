"""Check from headers and small files whether a checkpoint runs. The model is built as `load` builds it, without its
matrices, so that this check and the runtime agree."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from polyquant.architectures.language_model import language_model
from polyquant.errors import InputError, PolyquantError, UnsupportedError
from polyquant.runtime.headers_only import headers_only
from polyquant.runtime.load import assemble
from polyquant.runtime.recommended import recommended
from polyquant.tokenizers.tokenizer import open_tokenizer
from polyquant.types import Checkpoint

__all__ = ["is_model", "model_problems", "refuse_broken_model"]


def is_model(checkpoint: Checkpoint) -> bool:
    """True if the files name an architecture. Files of other tensors do not."""
    if checkpoint.naming == "gguf":
        return bool(checkpoint.metadata.get("general.architecture"))
    return bool(checkpoint.config.get("model_type") or checkpoint.config.get("architectures"))


def model_problems(checkpoint: Checkpoint) -> Iterator[tuple[str, PolyquantError]]:
    """Yield (code of a finding, error) for everything that `load`, its tokenizer and its sampling defaults would raise.

    An UnsupportedError about the model means that polyquant does not run it; its tokenizer may still be supported.
    Matrices are not read: their values may still be invalid. Nothing for a checkpoint that is not a model.
    """
    if not is_model(checkpoint):
        return
    model = language_model(checkpoint)
    for code, attempt in (("MOD002", _build), ("MOD004", open_tokenizer), ("MOD005", recommended)):
        if (problem := _error_of(attempt, model)) is not None and (
            code == "MOD002" or not isinstance(problem, UnsupportedError)
        ):
            yield code, problem


def refuse_broken_model(checkpoint: Checkpoint, hint: str) -> None:
    """Raise InputError for the first problem of a model; one that polyquant does not run is not judged."""
    for _, problem in model_problems(checkpoint):
        if not isinstance(problem, UnsupportedError):
            raise InputError(
                problem.message,
                file=problem.file or checkpoint.path,
                tensor=problem.tensor,
                expected=problem.expected,
                found=problem.found,
                hint=problem.hint or hint,
            )


def _build(model: Checkpoint) -> None:
    with headers_only():
        assemble(model)


def _error_of(attempt: Callable[[Checkpoint], object], model: Checkpoint) -> PolyquantError | None:
    try:
        attempt(model)
    except PolyquantError as problem:
        return problem
    return None
