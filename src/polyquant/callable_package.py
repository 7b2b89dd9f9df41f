"""Packages that are functions too: `polyquant.codecs` holds the modules of the codecs, and `polyquant.codecs()` lists them.

A package of that name hides a function of the same name from its parent as soon as anything imports it, so the package itself is made callable.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

__all__ = ["make_callable"]


def make_callable(package: str, place: str) -> None:
    """Calling the package calls the function at "module:attribute", which is imported then."""
    module, attribute = place.split(":")

    class CallablePackage(ModuleType):
        """A package that can be called."""

        def __call__(self) -> Any:
            """What the function returns."""
            return getattr(import_module(module), attribute)()

    sys.modules[package].__class__ = CallablePackage
