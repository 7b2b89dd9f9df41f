"""Writing a Hugging Face folder: floats, packed BitNet, EXL3."""

from __future__ import annotations

from collections.abc import Sequence

from polyquant.codecs.trellis_forms import as_exl3
from polyquant.formats.huggingface.layout import lay_out
from polyquant.formats.huggingface.options import HuggingFaceOptions
from polyquant.formats.plain_target import PlainTarget
from polyquant.formats.protocol import Choice, Planning
from polyquant.formats.steps import Step
from polyquant.types import Codec, Layout, TensorMap, TrellisCodes

__all__ = ["HuggingFaceTarget"]


class HuggingFaceTarget(PlainTarget):
    """safetensors in shards, config.json and the small files."""

    options = HuggingFaceOptions

    def kept(self, have: Codec, tensor: TensorMap) -> Choice:
        """Trellis codes that EXL3 can hold keep their codes."""
        if have.form is TrellisCodes and (exl3 := as_exl3(have, tensor.shape)) is not None:
            return Choice(exl3, "codes kept")
        return super().kept(have, tensor)

    def lay_out(self, planning: Planning, steps: Sequence[Step]) -> Layout:
        """Shards, index and files. Raises PlanError."""
        specs, files = [s.spec for s in steps], planning.translation.files
        size = planning.options.shard_bytes
        return lay_out(specs, files) if size is None else lay_out(specs, files, shard_bytes=size)
