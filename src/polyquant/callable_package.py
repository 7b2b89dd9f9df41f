"""Packages that are also functions: `polyquant.codecs` contains the codec modules, and `polyquant.codecs()` lists them.

A package hides a function of the same name in its parent once it is imported, so the package itself is made callable.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

__all__ = ["make_callable"]


def make_callable(package: str, place: str) -> None:
    """Make calls of the package call the function at "module:attribute", which is imported on the first call."""
    module, attribute = place.split(":")

    class CallablePackage(ModuleType):
        """A package that can be called."""

        def __call__(self) -> Any:
            """Call the function."""
            return getattr(import_module(module), attribute)()

    sys.modules[package].__class__ = CallablePackage
