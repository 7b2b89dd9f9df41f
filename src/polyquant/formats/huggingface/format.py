"""Hugging Face folders as a format object."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from polyquant.formats.folder_format import FolderFormat
from polyquant.formats.protocol import Target
from polyquant.options import NoOptions
from polyquant.types import Checkpoint, Evidence, Finding, Translation

__all__ = ["HUGGINGFACE"]


class _HuggingFace(FolderFormat):
    name, title, priority = "hf", "Hugging Face folders", 10
    open_options: type = NoOptions

    @property
    def target(self) -> Target:
        from polyquant.formats.huggingface.target import HuggingFaceTarget

        return HuggingFaceTarget()

    @property
    def findings(self) -> Mapping[str, str]:
        from polyquant.formats.huggingface.codes import CODES

        return CODES

    def sniff(self, path: Path) -> Evidence | None:
        from polyquant.formats.huggingface.open import sniff

        return sniff(path)

    def open(self, path: Path, options: Any) -> Checkpoint:
        from polyquant.formats.huggingface.open import open as open_folder

        return open_folder(path)

    def check(self, path: Path) -> Iterable[Finding]:
        from polyquant.formats.huggingface.check import check

        return check(path)

    def own_files(self, folder: Path, names: Iterable[str]) -> set[str]:
        from polyquant.formats.huggingface.folder import own_files

        return own_files(folder, names)

    def carry(self, checkpoint: Checkpoint) -> Translation:
        from polyquant.architectures.translate import float_config
        from polyquant.codecs.affine_forms import only_read

        carried = super().carry(checkpoint)
        if "config.json" in carried.files and any(only_read(w.codec) for w in checkpoint.values()):
            # no folder is written with such weights
            config = float_config(carried.files["config.json"])
            return replace(carried, files={**carried.files, "config.json": config})
        return carried


HUGGINGFACE = _HuggingFace()
