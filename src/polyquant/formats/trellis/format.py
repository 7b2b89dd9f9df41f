"""The format object of Trellis folders."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyquant.formats.folder_format import FolderFormat
from polyquant.formats.trellis.options import TrellisOpenOptions, TrellisOptions

if TYPE_CHECKING:
    from polyquant.types import Checkpoint, Codec

__all__ = ["TRELLIS"]


class _Trellis(FolderFormat):
    name, title, priority = "trellis-v3", "Trellis folders", 20
    files = "a folder with quantization_config.json"
    open_options: type = TrellisOpenOptions
    target_options: type = TrellisOptions
    package, target_place, sniff_place = "polyquant.formats.trellis", "target:TrellisTarget", "sniff:sniff"

    def open(self, path: Path, options: Any) -> Checkpoint:
        from polyquant.formats.trellis.open import open as open_folder

        return open_folder(path, repair=options.repair, axes=options.axes)

    def reads(self, codec: Codec) -> bool:
        from polyquant.codecs.metal_marlin import MetalMarlin

        return self.writes(codec) or isinstance(codec, MetalMarlin)

    def writes(self, codec: Codec) -> bool:
        from polyquant.codecs.dtypes import word_of
        from polyquant.codecs.trellis import Trellis

        return isinstance(codec, Trellis) or word_of(codec) is not None


TRELLIS = _Trellis()
