"""Base of formats that are folders with Hugging Face's file names."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyquant.formats.packaged import PackagedFormat

if TYPE_CHECKING:
    from polyquant.types import Checkpoint, TensorMap, Translation

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
        from polyquant.storage.source import file_bytes
        from polyquant.types import Translation

        tensors = usual_tensors(checkpoint)
        folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
        paths = {**checkpoint.files, **({"config.json": folder / "config.json"} if checkpoint.config else {})}
        files = {n: file_bytes(p) for n, p in paths.items()}
        return Translation(str(checkpoint.config.get("model_type", "")), tensors, files=files)

    def of_arrays(
        self, tensors: tuple[TensorMap, ...], metadata: Mapping[str, Any], path: Path
    ) -> tuple[Translation, Mapping[str, Any]]:
        """The metadata as config.json; none is written where there is no metadata. Raises PlanError."""
        from polyquant.errors import PlanError
        from polyquant.types import Translation

        try:
            text = json.dumps(dict(metadata), indent=2, ensure_ascii=False, allow_nan=False)
            files = {"config.json": text.encode() + b"\n"} if metadata else {}
        except (TypeError, ValueError) as problem:
            raise PlanError(f"the metadata does not fit config.json: {problem}", file=path) from None
        return Translation(str(metadata.get("model_type", "")), tensors, files=files), {}

    def plain(self, checkpoint: Checkpoint) -> Checkpoint:
        """The checkpoint itself: nothing in it is specific to this format."""
        return checkpoint
