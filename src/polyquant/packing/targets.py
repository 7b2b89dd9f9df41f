"""Checks of a store that a model is packed into: files of other programs are not replaced."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection
from pathlib import Path

from polyquant.errors import PlanError, printable
from polyquant.storage.claims import settle_all
from polyquant.storage.renames import sync_folder

__all__ = ["folder_at", "free_name", "make_folders"]


def folder_at(path: Path, entries: Collection[str], what: str, *, unfinished: str = "") -> None:
    """Create the folder of a store, or check that a folder with content is one: it has one of `entries`.

    unfinished: the only entry of a store that a killed run leaves. Raises PlanError, OSError.
    """
    if os.path.lexists(path) and not path.is_dir():
        raise PlanError("is not a folder", file=path)
    if not path.exists():
        make_folders(path, path.parent)
        return
    with os.scandir(path) as found:
        names = {entry.name for entry in found if ".polyquant-" not in entry.name}
    if names - {unfinished} and not names & set(entries):
        raise PlanError(f"is not {what}", file=path, found=printable(min(names)), hint="choose an empty folder")


def make_folders(path: Path, above: Path) -> None:
    """Create the missing folders of `path` below `above`, which exists, and sync the name of each. Raises OSError."""
    if path == above or path.is_dir():
        return
    make_folders(path.parent, above)
    path.mkdir(exist_ok=True)
    sync_folder(path.parent)


def free_name(target: Path, *, overwrite: bool, what: str, shown: str) -> None:
    """Raise PlanError if a manifest exists and may not be replaced; a killed run is finished or undone first."""
    settle_all(target.absolute())
    if not os.path.lexists(target):
        return
    if not stat.S_ISREG(target.lstat().st_mode):
        raise PlanError("is not a manifest and is not replaced", file=target)
    if not overwrite:
        raise PlanError(
            f"target exists: a {what} {printable(shown)}", file=target, hint="choose another name, or pass --overwrite"
        )
