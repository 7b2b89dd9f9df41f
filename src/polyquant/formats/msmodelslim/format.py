"""msModelSlim folders as a format object."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from polyquant.formats.folder_format import FolderFormat
from polyquant.formats.protocol import Target
from polyquant.options import NoOptions
from polyquant.types import Checkpoint, Evidence, Finding

__all__ = ["MSMODELSLIM"]


class _MsModelSlim(FolderFormat):
    name, title, priority = "msmodelslim", "msModelSlim folders", 40
    open_options: type = NoOptions

    @property
    def target(self) -> Target:
        from polyquant.formats.msmodelslim.target import MsModelSlimTarget

        return MsModelSlimTarget()

    @property
    def findings(self) -> Mapping[str, str]:
        from polyquant.formats.msmodelslim.codes import CODES

        return CODES

    def sniff(self, path: Path) -> Evidence | None:
        from polyquant.formats.msmodelslim.open import sniff

        return sniff(path)

    def open(self, path: Path, options: Any) -> Checkpoint:
        from polyquant.formats.msmodelslim.open import open as open_folder

        return open_folder(path)

    def check(self, path: Path) -> Iterable[Finding]:
        from polyquant.formats.msmodelslim.check import check

        return check(path)

    def check_consumer(self, path: Path, name: str) -> Iterable[Finding]:
        from polyquant.formats.msmodelslim.consumers import check_target

        return check_target(path, name)

    def layer_types(self, checkpoint: Checkpoint) -> Mapping[str, str]:
        types = checkpoint.metadata.get("types")
        types = types if isinstance(types, Mapping) else {}
        return {n: str(types.get(n, "none")) for n, w in checkpoint.items() if len(w.shape) == 2}

    def own_files(self, folder: Path, names: Iterable[str]) -> set[str]:
        from polyquant.formats.msmodelslim.folder import own_files

        return own_files(folder, names)

    def plain(self, checkpoint: Checkpoint) -> Checkpoint:
        from polyquant.formats.msmodelslim.plain_model import plain_model

        return plain_model(checkpoint)


MSMODELSLIM = _MsModelSlim()
