"""Notes about --prompt-lookup."""

from __future__ import annotations

from collections.abc import Iterator

from polyquant.runtime.model import Model

__all__ = ["lookup_notes"]


def lookup_notes(model: Model, drafts: int) -> Iterator[str]:
    """Yield a note if the option has no effect with this model, with the reason."""
    if drafts and (problem := model.session().lookup_problem(drafts)):
        yield f"--prompt-lookup {drafts} has no effect: {problem}"
