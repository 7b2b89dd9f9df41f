"""Writing GGUF: which codecs it holds, the file type that loaders print, the layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from polyquant.architectures import translate
from polyquant.capabilities import HoldsBlocks, Tiled
from polyquant.codecs import affine_forms
from polyquant.errors import CodecError, PlanError
from polyquant.formats.actions import survives
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
"""Of a layout that does not know its target yet."""
_ACTIVATIONS = ("q8_1", "q8_k")
"""Types that llama.cpp rounds activations to while it runs. It has no kernels for files that store weights in them."""


class GGUFTarget(PlainTarget):
    """Every ggml type, and the ternary layouts of bitnet.cpp and Trinity."""

    options = GGUFOptions
    naming = "gguf"
    suffix = ".gguf"

    def for_model(self, source: Checkpoint, translation: Translation, options: Any) -> Any:
        """Raises PlanError for an architecture where none is chosen: GGUF keeps the one it has."""
        if options.architecture and source.format == "gguf":
            raise PlanError("an architecture can be chosen only when Hugging Face becomes GGUF")
        return options

    def translate(self, source: Checkpoint, recipe: Recipe, options: Any) -> Translation:
        """From Hugging Face's names."""
        return translate.to_gguf(source, architecture=options.architecture, pre=options.pre_tokenizer)

    def choose(self, source: Checkpoint, tensor: TensorMap, recipe: Recipe, facts: Facts, options: Any) -> Choice:
        """As any target, with the tile of TL1 and TL2. Raises CodecError."""
        chosen, why = super().choose(source, tensor, recipe, facts, options)
        if chosen.name in _ACTIVATIONS:
            raise CodecError(
                f"{chosen} is for activations: no program runs weights stored in it", hint="use q8_0 instead"
            )
        if options.tile is not None and isinstance(chosen, Tiled):
            chosen = chosen.with_tile(options.tile)
        return Choice(chosen, why)

    def held(self, weights: Sequence[Weight], tensor: TensorMap) -> Choice | None:
        """Codes of other tools in ggml blocks where one type holds them exactly."""
        if not survives(weights, tensor):
            return None
        name = affine_forms.blocks_of(weights[0]) if len(weights) == 1 else _blocks_of_all(weights)
        return None if name is None else Choice(codec(name), "codes kept")

    def vector(self, have: Codec) -> Codec:
        """llama.cpp wants float32."""
        return codec("f32")

    def kept(self, have: Codec, tensor: TensorMap) -> Choice:
        """Almost everything has a type number; packed BitNet becomes I2_S, trellis codes become floats."""
        if have.name.startswith("hf_bitnet") or tensor.ternarize:
            return Choice(codec("i2_s.x86"), "ternary")
        if isinstance(have, HoldsBlocks):
            return Choice(codec(have.holds), "codes kept")
        return super().kept(have, tensor) if have.form is TrellisCodes else Choice(have, "kept")

    def lay_out(self, planning: Planning, steps: Sequence[Step]) -> Layout:
        """One file, or a split model. Raises PlanError for what GGUF cannot hold."""
        metadata = _with_file_type(planning.translation.metadata, planning.recipe, steps)
        specs = [s.spec for s in steps]
        return lay_out(specs, metadata, name=DEFAULT_NAME, split_bytes=planning.options.shard_bytes)


def _blocks_of_all(weights: Sequence[Weight]) -> str | None:
    """The smallest ggml type that holds the codes of all; None where there is none."""
    types = ("q4_0", "q4_1", "q8_0")
    return next((t for t in types if all(affine_forms.same_codes(w, codec(t)) for w in weights)), None)


def _with_file_type(metadata: Mapping[str, Meta], recipe: Recipe, steps: Sequence[Step]) -> dict[str, Meta]:
    """general.file_type of the recipe; without one, of the codec that most matrices have. Loaders only print it."""
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
