"""The GGUF format object."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from polyquant.formats.gguf.options import GGUFOpenOptions, GGUFOptions
from polyquant.formats.packaged import PackagedFormat

if TYPE_CHECKING:
    from polyquant.types import Checkpoint, Translation

__all__ = ["GGUF"]


class _GGUF(PackagedFormat):
    name, title, priority = "gguf", "GGUF files", 30
    open_options: type = GGUFOpenOptions
    target_options: type = GGUFOptions
    package, target_place, sniff_place = "polyquant.formats.gguf", "target:GGUFTarget", "reading:sniff"

    def open(self, path: Path, options: Any) -> Checkpoint:
        from polyquant.formats.gguf.reading import open_gguf, with_tile

        opened = open_gguf(path, dialect=options.dialect, ternary_layout=options.ternary_layout)
        return opened if options.tile is None else with_tile(opened, options.tile)

    def own_files(self, folder: Path, names: Iterable[str]) -> set[str]:
        return set()  # one file, never a folder

    def carry(self, checkpoint: Checkpoint) -> Translation:
        from polyquant.formats.gguf.header import Metadata
        from polyquant.types import TensorMap, Translation

        typed = dict(cast(Metadata, checkpoint.metadata).items_typed())
        architecture = typed.get("general.architecture")
        tensors = tuple(TensorMap(w.name, (w.name,), w.shape, keep_float=len(w.shape) < 2) for w in checkpoint.values())
        return Translation(str(architecture.value) if architecture else "", tensors, metadata=typed)

    def plain(self, checkpoint: Checkpoint) -> Checkpoint:
        return checkpoint


GGUF = _GGUF()
