"""Write a Hugging Face folder: floats, packed BitNet, EXL3, and existing MXFP4 codes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from polyquant.architectures import translate
from polyquant.codecs.hf_mxfp4 import HF_MXFP4
from polyquant.codecs.trellis_forms import as_exl3
from polyquant.errors import PlanError
from polyquant.formats.actions import blocks_of, common
from polyquant.formats.huggingface.layout import lay_out, one_file
from polyquant.formats.huggingface.mxfp4 import BLOCKS, as_stored
from polyquant.formats.huggingface.options import HuggingFaceOptions
from polyquant.formats.plain_target import TORCH_NAMES, PlainTarget
from polyquant.formats.protocol import Choice, Planning
from polyquant.formats.steps import Step
from polyquant.recipes.recipe import Facts, Recipe
from polyquant.types import Checkpoint, Codec, Layout, TensorMap, Translation, TrellisCodes

__all__ = ["HuggingFaceTarget"]


class HuggingFaceTarget(PlainTarget):
    """The target: safetensors shards, config.json and the small files."""

    options = HuggingFaceOptions

    def translate(self, source: Checkpoint, recipe: Recipe, options: Any) -> Translation:
        """Translate from GGUF to Hugging Face's names; without a recipe, codes of another tool may be kept."""
        return translate.to_hf(source, dtype=TORCH_NAMES.get(recipe.base or ""), packed=recipe.base is None)

    def prepare(self, planning: Planning) -> tuple[Planning, list[Step]]:
        """Plan the steps; MXFP4 weights without a recipe are kept."""

        def kept(tensor: TensorMap) -> TensorMap:
            name, _ = planning.recipe.choose((tensor.target, *tensor.sources), planning.facts)
            return as_stored(tensor, planning.source) if name is None else tensor

        tensors = tuple(kept(t) for t in planning.translation.tensors)
        return super().prepare(replace(planning, translation=replace(planning.translation, tensors=tensors)))

    def choose(self, source: Checkpoint, tensor: TensorMap, recipe: Recipe, facts: Facts, options: Any) -> Choice:
        """Choose a codec. Raises PlanError for a rule that decodes a single MXFP4 tensor."""
        chosen = super().choose(source, tensor, recipe, facts, options)
        if _packed(common([source[n] for n in tensor.sources]), tensor) and chosen.codec is not HF_MXFP4:
            raise PlanError(
                f"MXFP4 experts cannot become {chosen.codec} individually",
                tensor=tensor.target,
                hint="choose a codec for all matrices, e.g. --codec bf16",
            )
        return chosen

    def kept(self, have: Codec, tensor: TensorMap) -> Choice:
        """The source's codec; trellis codes are kept if EXL3 can store them."""
        if have.form is TrellisCodes and (exl3 := as_exl3(have, tensor.shape)) is not None:
            return Choice(exl3, "codes kept")
        if _packed(have, tensor):
            return Choice(HF_MXFP4, "codes kept")
        return super().kept(have, tensor)

    def lay_out(self, planning: Planning, steps: Sequence[Step]) -> Layout:
        """Lay out shards, index and files. Raises PlanError."""
        specs, files = [s.spec for s in steps], planning.translation.files
        size = planning.options.shard_bytes
        if planning.options.single_file:
            if size is not None:
                raise PlanError("single_file and shard_bytes are mutually exclusive")
            entries = {key: str(meta.value) for key, meta in planning.translation.metadata.items()}
            return one_file(specs, entries)
        return lay_out(specs, files) if size is None else lay_out(specs, files, shard_bytes=size)


def _packed(have: Codec, tensor: TensorMap) -> bool:
    """True for a tensor that is stored as MXFP4 under a matching name."""
    return tensor.target.endswith(BLOCKS) and blocks_of(have) == HF_MXFP4.holds
