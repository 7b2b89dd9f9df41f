"""The format object of Hugging Face folders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from polyquant.formats.folder_format import FolderFormat
from polyquant.formats.huggingface.options import HuggingFaceOptions
from polyquant.formats.huggingface.scheme_names import DEFAULTS
from polyquant.options import NoOptions

if TYPE_CHECKING:
    from polyquant.types import Checkpoint, Codec, TensorMap, Translation

__all__ = ["HUGGINGFACE"]


class _HuggingFace(FolderFormat):
    name, title, priority = "hf", "Hugging Face folders", 10
    files = "a folder, or one .safetensors or .bin file"
    readers: ClassVar[Mapping[str, str]] = {
        "transformers": "python -c \"from transformers import pipeline; pipeline(model='{repo}')\""
    }
    schemes: ClassVar[Mapping[str, str]] = DEFAULTS
    open_options: type = NoOptions
    target_options: type = HuggingFaceOptions
    package, target_place = "polyquant.formats.huggingface", "target:HuggingFaceTarget"

    def open(self, path: Path, options: Any) -> Checkpoint:
        from polyquant.formats.huggingface.open import open as open_folder

        return open_folder(path)

    def reads(self, codec: Codec) -> bool:
        from polyquant.formats.huggingface.dtypes import holds, of_other_tools

        return holds(codec) or of_other_tools(codec)

    def writes(self, codec: Codec) -> bool:
        from polyquant.formats.huggingface.dtypes import holds

        return holds(codec)

    def of_arrays(
        self, tensors: tuple[TensorMap, ...], metadata: Mapping[str, Any], path: Path
    ) -> tuple[Translation, Mapping[str, Any]]:
        from polyquant.errors import PlanError
        from polyquant.types import Kind, Meta, Translation

        if path.suffix != ".safetensors":
            return super().of_arrays(tensors, metadata, path)
        for key, value in metadata.items():
            if not isinstance(value, str):
                raise PlanError(
                    f"the metadata of a .safetensors file is text: '{key}' is {type(value).__name__}",
                    file=path,
                    hint="write it as text, e.g. json.dumps(value)",
                )
        entries = {key: Meta(Kind.STRING, value) for key, value in metadata.items()}
        return Translation("", tensors, metadata=entries), {"single_file": True}

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
