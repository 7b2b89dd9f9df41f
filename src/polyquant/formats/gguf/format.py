"""GGUF as a format object."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from polyquant.formats.gguf.options import GGUFOpenOptions
from polyquant.formats.protocol import Target
from polyquant.types import Checkpoint, Evidence, Finding, TensorMap, Translation

__all__ = ["GGUF"]


class _GGUF:
    name, title, priority = "gguf", "GGUF files", 30
    open_options: type = GGUFOpenOptions

    @property
    def target(self) -> Target:
        from polyquant.formats.gguf.target import GGUFTarget

        return GGUFTarget()

    @property
    def findings(self) -> Mapping[str, str]:
        from polyquant.formats.gguf.codes import CODES

        return CODES

    def sniff(self, path: Path) -> Evidence | None:
        from polyquant.formats.gguf.reading import sniff

        return sniff(path)

    def open(self, path: Path, options: Any) -> Checkpoint:
        from polyquant.formats.gguf.reading import open_gguf, with_tile

        opened = open_gguf(path, dialect=options.dialect, ternary_layout=options.ternary_layout)
        return opened if options.tile is None else with_tile(opened, options.tile)

    def check(self, path: Path) -> Iterable[Finding]:
        from polyquant.formats.gguf.check import check

        return check(path)

    def own_files(self, folder: Path, names: Iterable[str]) -> set[str]:
        return set()  # one file, never a folder

    def carry(self, checkpoint: Checkpoint) -> Translation:
        from polyquant.formats.gguf.header import Metadata

        typed = dict(cast(Metadata, checkpoint.metadata).items_typed())
        architecture = typed.get("general.architecture")
        tensors = tuple(TensorMap(w.name, (w.name,), w.shape, keep_float=len(w.shape) < 2) for w in checkpoint.values())
        return Translation(str(architecture.value) if architecture else "", tensors, metadata=typed)

    def plain(self, checkpoint: Checkpoint) -> Checkpoint:
        return checkpoint


GGUF = _GGUF()
