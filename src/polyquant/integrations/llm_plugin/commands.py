"""The commands `llm polyquant add`, `list` and `remove`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import click

from polyquant.errors import PolyquantError, printable
from polyquant.integrations.llm_plugin import store

__all__ = ["group"]


@click.group(name="polyquant")
def group() -> None:
    """Models that polyquant runs: GGUF files and quantized folders."""


@group.command()
@click.argument("name")
@click.argument("path")
def add(name: str, path: str) -> None:
    """Add the model at PATH as NAME, which then works with -m."""
    with _one_line():
        entry = store.add(name, path)
    uses = [word for word, has in (("text", entry.generates), ("embeddings", entry.embeds)) if has]
    click.echo(f"{name}: {printable(entry.path)} ({' and '.join(uses)})")


@group.command(name="list")
def list_models() -> None:
    """List the added models."""
    with _one_line():
        models = store.added()
    for name, entry in models.items():
        click.echo(f"{printable(name)}: {printable(entry.path)}")
    if not models:
        click.echo("no models: llm polyquant add NAME PATH")


@group.command()
@click.argument("name")
def remove(name: str) -> None:
    """Remove NAME from the list. The file of the model stays."""
    with _one_line():
        store.remove(name)


@contextmanager
def _one_line() -> Iterator[None]:
    try:
        yield
    except PolyquantError as problem:
        raise click.ClickException(str(problem)) from None
