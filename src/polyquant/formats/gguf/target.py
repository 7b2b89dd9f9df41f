"""Write GGUF: supported codecs, the file type that loaders print, the layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from polyquant.architectures import translate
from polyquant.capabilities import HoldsBlocks, Tiled
from polyquant.codecs import affine_forms, float_forms
from polyquant.errors import CodecError, PlanError
from polyquant.formats.actions import survives
from polyquant.formats.gguf.dialect import ACTIVATIONS
from polyquant.formats.gguf.layout import lay_out
from polyquant.formats.gguf.options import GGUFOptions
from polyquant.formats.plain_target import PlainTarget
from polyquant.formats.protocol import Choice, Planning
from polyquant.formats.steps import Step
from polyquant.recipes.reading import load_recipe
from polyquant.recipes.recipe import Facts, Recipe
from polyquant.registry import codec
from polyquant.types import Checkpoint, Codec, Kind, Layout, Meta, TensorMap, Translation, TrellisCodes, Weight

__all__ = ["DEFAULT_NAME", "GGUFTarget"]

DEFAULT_NAME = "model.gguf"
"""The file name in a layout before the target is known."""


class GGUFTarget(PlainTarget):
    """The GGUF target: every ggml type, and the ternary layouts of bitnet.cpp and Trinity."""

    options = GGUFOptions
    naming = "gguf"
    suffix = ".gguf"

    def for_model(self, source: Checkpoint, translation: Translation, options: Any) -> Any:
        """Raise PlanError if an architecture is chosen for a GGUF source, which keeps its own."""
        if options.architecture and source.format == "gguf":
            raise PlanError("--architecture applies only to conversions from Hugging Face to GGUF")
        return options

    def translate(self, source: Checkpoint, recipe: Recipe, options: Any) -> Translation:
        """Translate from Hugging Face's names."""
        return translate.to_gguf(source, architecture=options.architecture, pre=options.pre_tokenizer)

    def choose(self, source: Checkpoint, tensor: TensorMap, recipe: Recipe, facts: Facts, options: Any) -> Choice:
        """Choose as other targets do, with the tile of TL1 and TL2. Raises CodecError."""
        choice = super().choose(source, tensor, recipe, facts, options)
        chosen = float_forms.for_stack(choice.codec, tensor.shape)
        if chosen.name in ACTIVATIONS:
            raise CodecError(
                f"{chosen} is for activations: no program runs weights stored in it", hint="use q8_0 instead"
            )
        if options.tile is not None and isinstance(chosen, Tiled):
            return choice._replace(codec=chosen.with_tile(options.tile))
        return choice._replace(codec=chosen)

    def held(self, weights: Sequence[Weight], tensor: TensorMap) -> Choice | None:
        """A ggml type that stores the codes of another tool exactly; None if there is none."""
        if not survives(weights, tensor):
            return None
        if (small := float_forms.as_ggml(weights, tensor.op)) is not None:
            return Choice(small, "codes kept")
        name = affine_forms.blocks_of(weights[0]) if len(weights) == 1 else _blocks_of_all(weights)
        return None if name is None else Choice(codec(name), "codes kept")

    def vector(self, have: Codec) -> Codec:
        """float32, as llama.cpp expects."""
        return codec("f32")

    def kept(self, have: Codec, tensor: TensorMap) -> Choice:
        """The source's codec; packed BitNet becomes I2_S, trellis codes become floats."""
        if have.name.startswith("hf_bitnet") or tensor.ternarize:
            return Choice(codec("i2_s.x86"), "ternary")
        if isinstance(have, HoldsBlocks):
            return Choice(codec(have.holds), "codes kept")
        return super().kept(have, tensor) if have.form is TrellisCodes else Choice(have, "kept")

    def lay_out(self, planning: Planning, steps: Sequence[Step]) -> Layout:
        """Lay out one file, or a split model. Raises PlanError for tensors that GGUF cannot store."""
        metadata = _with_file_type(planning.translation.metadata, planning.recipe, steps)
        specs = [s.spec for s in steps]
        return lay_out(specs, metadata, name=DEFAULT_NAME, split_bytes=planning.options.shard_bytes)


def _blocks_of_all(weights: Sequence[Weight]) -> str | None:
    """The smallest ggml type that stores the codes of all weights; None if there is none."""
    types = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0")
    return next((t for t in types if all(affine_forms.same_codes(w, codec(t)) for w in weights)), None)


def _with_file_type(metadata: Mapping[str, Meta], recipe: Recipe, steps: Sequence[Step]) -> dict[str, Meta]:
    """Add general.file_type: of the recipe, or of the codec of most matrices. Loaders only print it."""
    out = dict(metadata)
    if recipe.base is None and "general.file_type" in out:
        return out
    file_type = recipe.file_type
    if file_type is None:
        weights: Counter[str] = Counter()
        for s in steps:
            if not s.map.is_vector:
                weights[s.target.name] += s.weights
        most = weights.most_common(1)[0][0] if weights else "f32"
        most = "i2_s" if "i2_s" in most else most
        try:
            file_type = load_recipe(most).file_type
        except LookupError:
            file_type = None
    if file_type is not None:
        out["general.file_type"] = Meta(Kind.UINT32, file_type)
    out.setdefault("general.quantization_version", Meta(Kind.UINT32, 2))
    return out
