"""Checks of a target, shared by all commands that write: its folder exists, and no file is replaced by accident."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from polyquant.errors import PlanError
from polyquant.storage.locations import RemotePath

__all__ = ["refuse_missing_folder", "refuse_present"]

_SCHEME = re.compile("[A-Za-z][A-Za-z0-9+.-]+:")


def refuse_present(target: Path, *, overwrite: bool, check: Callable[[Path], object]) -> None:
    """Raise PlanError if the target exists and must not be replaced, or its folder is missing.

    check: called with an existing target if `overwrite`; raises PlanError if it must be kept.
    """
    refuse_missing_folder(target)
    if target.exists() if isinstance(target, RemotePath) else os.path.lexists(target):
        if not overwrite:
            raise PlanError("target exists", file=target, hint="choose another name, or pass --overwrite")
        check(target)


def refuse_missing_folder(target: Path) -> None:
    """Raise PlanError if the folder of a local target does not exist."""
    folder = target.absolute().parent
    if isinstance(target, RemotePath) or folder.is_dir():
        return
    if any(_SCHEME.fullmatch(part) for part in target.parts):
        raise PlanError("this is written to local files only, not to a URL", file=target, hint="name a local path")
    raise PlanError("the target's folder does not exist", file=target, hint=f"mkdir -p {folder}")
