"""The format object of msModelSlim folders."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from polyquant.formats.folder_format import FolderFormat
from polyquant.formats.msmodelslim.options import MsModelSlimOptions
from polyquant.options import NoOptions

if TYPE_CHECKING:
    from polyquant.types import Checkpoint, Codec, Finding

__all__ = ["MSMODELSLIM"]


class _MsModelSlim(FolderFormat):
    name, title, priority = "msmodelslim", "msModelSlim folders", 40
    readers: ClassVar[Mapping[str, str]] = {"vllm-ascend": "vllm serve {repo} --quantization ascend"}
    consumers: tuple[str, ...] = ("vllm-ascend", "sglang", "mindie")
    files = "a folder with quant_model_description.json"
    open_options: type = NoOptions
    target_options: type = MsModelSlimOptions
    package, target_place, sniff_place = "polyquant.formats.msmodelslim", "target:MsModelSlimTarget", "sniff:sniff"

    def open(self, path: Path, options: Any) -> Checkpoint:
        from polyquant.formats.msmodelslim.open import open as open_folder

        return open_folder(path)

    def reads(self, codec: Codec) -> bool:
        from polyquant.codecs.dtypes import word_of
        from polyquant.codecs.msmodelslim import MsModelSlim

        return isinstance(codec, MsModelSlim) or word_of(codec) is not None

    def writes(self, codec: Codec) -> bool:
        return self.reads(codec)

    def check_consumer(self, path: Path, name: str) -> Iterable[Finding]:
        from polyquant.formats.msmodelslim.consumers import check_target

        return check_target(path, name)

    def layer_types(self, checkpoint: Checkpoint) -> Mapping[str, str]:
        types = checkpoint.metadata.get("types")
        types = types if isinstance(types, Mapping) else {}
        return {n: str(types.get(n, "none")) for n, w in checkpoint.items() if len(w.shape) == 2}

    def plain(self, checkpoint: Checkpoint) -> Checkpoint:
        from polyquant.formats.msmodelslim.plain_model import plain_model

        return plain_model(checkpoint)


MSMODELSLIM = _MsModelSlim()
