"""The type of arguments that name a model: a path or a URL."""

from __future__ import annotations

from typing import Any

import click

from polyquant.storage.locations import shown_path

__all__ = ["SOURCE"]


class _Source(click.Path):
    """A path, or a URL without its credentials, which `storage.remote.urls` keeps: commands may print the value."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return shown_path(value)


SOURCE = _Source()
