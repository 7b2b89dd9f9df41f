"""Functions for URLs that are imported on their first call, since local files do not need them."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

__all__ = ["Deferred"]


@dataclass(frozen=True, slots=True)
class Deferred:
    """A function at "module:attribute", imported on its first call."""

    place: str

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Call the function."""
        module, name = self.place.split(":")
        return getattr(import_module(module), name)(*arguments, **options)
