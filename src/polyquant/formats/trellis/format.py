"""Trellis folders as a format object."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from polyquant.formats.folder_format import FolderFormat
from polyquant.formats.protocol import Target
from polyquant.formats.trellis.options import TrellisOpenOptions
from polyquant.types import Checkpoint, Evidence, Finding

__all__ = ["TRELLIS"]


class _Trellis(FolderFormat):
    name, title, priority = "trellis-v3", "Trellis folders", 20
    open_options: type = TrellisOpenOptions

    @property
    def target(self) -> Target:
        from polyquant.formats.trellis.target import TrellisTarget

        return TrellisTarget()

    @property
    def findings(self) -> Mapping[str, str]:
        from polyquant.formats.trellis.codes import CODES

        return CODES

    def sniff(self, path: Path) -> Evidence | None:
        from polyquant.formats.trellis.open import sniff

        return sniff(path)

    def open(self, path: Path, options: Any) -> Checkpoint:
        from polyquant.formats.trellis.open import open as open_folder

        return open_folder(path, repair=options.repair, axes=options.axes)

    def check(self, path: Path) -> Iterable[Finding]:
        from polyquant.formats.trellis.check import check

        return check(path)

    def own_files(self, folder: Path, names: Iterable[str]) -> set[str]:
        from polyquant.formats.trellis.folder import own_files

        return own_files(folder, names)


TRELLIS = _Trellis()
