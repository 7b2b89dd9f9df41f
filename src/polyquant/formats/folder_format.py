"""Base of formats that are folders with Hugging Face's file names."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from polyquant.formats.packaged import PackagedFormat

if TYPE_CHECKING:
    from polyquant.types import Checkpoint, Translation

__all__ = ["FolderFormat"]


class FolderFormat(PackagedFormat):
    """A format of folders with config.json and small files; `own_files` is in the module `folder` of its package."""

    def own_files(self, folder: Path, names: Iterable[str]) -> set[str]:
        """The files that belong to a model."""
        own: set[str] = self.take("folder:own_files")(folder, names)
        return own

    def carry(self, checkpoint: Checkpoint) -> Translation:
        """Copy every known file byte for byte."""
        from polyquant.architectures.translate import usual_tensors
        from polyquant.types import Translation

        tensors = usual_tensors(checkpoint)
        folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
        paths = {**checkpoint.files, **({"config.json": folder / "config.json"} if checkpoint.config else {})}
        files = {n: p.read_bytes() for n, p in paths.items()}
        return Translation(str(checkpoint.config.get("model_type", "")), tensors, files=files)

    def plain(self, checkpoint: Checkpoint) -> Checkpoint:
        """The checkpoint itself: nothing in it is specific to this format."""
        return checkpoint
