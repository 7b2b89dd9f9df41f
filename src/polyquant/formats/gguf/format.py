"""The GGUF format object."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

from polyquant.formats.gguf.options import LAYOUTS, GGUFOpenOptions, GGUFOptions
from polyquant.formats.packaged import PackagedFormat

if TYPE_CHECKING:
    from polyquant.types import Checkpoint, Codec, TensorMap, Translation

__all__ = ["GGUF"]


class _GGUF(PackagedFormat):
    name, title, priority = "gguf", "GGUF files", 30
    files = "one .gguf file, or the members of a split model"
    readers: ClassVar[Mapping[str, str]] = {"llama.cpp": "llama-cli -hf {repo} -hff {file}"}
    open_options: type = GGUFOpenOptions
    target_options: type = GGUFOptions
    package, target_place, sniff_place = "polyquant.formats.gguf", "target:GGUFTarget", "reading:sniff"

    def open(self, path: Path, options: Any) -> Checkpoint:
        from polyquant.formats.gguf.reading import open_gguf, with_tile

        opened = open_gguf(path, dialect=options.dialect, ternary_layout=options.ternary_layout)
        return opened if options.tile is None else with_tile(opened, options.tile)

    def reads(self, codec: Codec) -> bool:
        from polyquant.formats.gguf.dialect import TYPES

        return codec.name in LAYOUTS or any(t.codec == codec.name for types in TYPES.values() for t in types.values())

    def writes(self, codec: Codec) -> bool:
        from polyquant.formats.gguf.dialect import ACTIVATIONS, number_of

        return number_of(codec.name) is not None and codec.name not in ACTIVATIONS

    def own_files(self, folder: Path, names: Iterable[str]) -> set[str]:
        return set()  # one file, never a folder

    def of_arrays(
        self, tensors: tuple[TensorMap, ...], metadata: Mapping[str, Any], path: Path
    ) -> tuple[Translation, Mapping[str, Any]]:
        from polyquant.formats.gguf.inferred import inferred
        from polyquant.types import Translation

        typed = inferred(metadata)
        architecture = typed.get("general.architecture")
        return Translation(str(architecture.value) if architecture else "", tensors, metadata=typed), {}

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
