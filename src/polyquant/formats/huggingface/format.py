"""The format object of Hugging Face folders."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyquant.formats.folder_format import FolderFormat
from polyquant.formats.huggingface.options import HuggingFaceOptions
from polyquant.options import NoOptions

if TYPE_CHECKING:
    from polyquant.types import Checkpoint, Translation

__all__ = ["HUGGINGFACE"]


class _HuggingFace(FolderFormat):
    name, title, priority = "hf", "Hugging Face folders", 10
    open_options: type = NoOptions
    target_options: type = HuggingFaceOptions
    package, target_place = "polyquant.formats.huggingface", "target:HuggingFaceTarget"

    def open(self, path: Path, options: Any) -> Checkpoint:
        from polyquant.formats.huggingface.open import open as open_folder

        return open_folder(path)

    def carry(self, checkpoint: Checkpoint) -> Translation:
        from polyquant.architectures.translate import float_config
        from polyquant.codecs.affine_forms import only_read
        from polyquant.formats.huggingface.mxfp4 import as_floats

        carried = super().carry(checkpoint)
        carried = replace(carried, tensors=tuple(as_floats(t, checkpoint) for t in carried.tensors))
        if "config.json" in carried.files and any(only_read(w.codec) for w in checkpoint.values()):
            # such weights are never written
            config = float_config(carried.files["config.json"])
            return replace(carried, files={**carried.files, "config.json": config})
        return carried


HUGGINGFACE = _HuggingFace()
