"""Plugin of the command-line tool `llm` (https://llm.datasette.io), loaded through its entry-point group `llm`.

    llm polyquant add tiny model.gguf
    llm -m tiny 'Why is the sky blue?'
    llm -m polyquant/model.gguf 'Why is the sky blue?'

Models are opened when they are first used.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import llm

from polyquant.errors import PolyquantError
from polyquant.integrations.llm_plugin.store import Entry, added

__all__ = ["register_commands", "register_embedding_models", "register_models"]

PREFIX = "polyquant/"
"""A model's id is this and its name, or this and a path."""


@llm.hookimpl
def register_models(register: Callable[..., None]) -> None:
    """Register the added models that generate text, and paths in the command line."""
    from polyquant.integrations.llm_plugin.models import PolyquantModel

    models = _added()
    for name, entry in models.items():
        if entry.generates:
            register(PolyquantModel(f"{PREFIX}{name}", entry.path), aliases=(name,))
    for path in _paths():
        if path not in models:
            register(PolyquantModel(f"{PREFIX}{path}", path))


@llm.hookimpl
def register_embedding_models(register: Callable[..., None]) -> None:
    """Register the added models that give embeddings, and paths in the command line."""
    from polyquant.integrations.llm_plugin.models import PolyquantEmbedding

    models = _added()
    for name, entry in models.items():
        if entry.embeds:
            register(PolyquantEmbedding(f"{PREFIX}{name}", entry.path), aliases=(name,))
    for path in _paths():
        if path not in models:
            register(PolyquantEmbedding(f"{PREFIX}{path}", path))


@llm.hookimpl
def register_commands(cli: Any) -> None:
    """Register `llm polyquant`."""
    from polyquant.integrations.llm_plugin.commands import group

    cli.add_command(group)


def _added() -> dict[str, Entry]:
    """Return the added models; none, and a line, for an invalid list: llm calls this for every command."""
    try:
        return added()
    except PolyquantError as problem:
        print(f"polyquant: {problem}", file=sys.stderr)
        return {}


def _paths() -> Iterator[str]:
    """Yield the paths that follow -m and --model: llm knows registered ids only."""
    arguments = [part for argument in sys.argv[1:] for part in _split(argument)]
    found = (value for flag, value in pairwise(arguments) if flag in ("-m", "--model"))
    yield from dict.fromkeys(v.removeprefix(PREFIX) for v in found if v.startswith(PREFIX) and v != PREFIX)


def _split(argument: str) -> tuple[str, ...]:
    """Split --model=ID into flag and value."""
    flag, equals, value = argument.partition("=")
    return (flag, value) if flag == "--model" and equals else (argument,)
