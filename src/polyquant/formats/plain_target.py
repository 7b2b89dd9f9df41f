"""A target that stores what recipes choose, tensor by tensor: the base of the built-in targets.

A tensor gets, in this order: its own codec if it is not a float; for vectors the target's type; the codec of the
recipe, or a substitute with smaller blocks; without a recipe the source's codec, or the one closest to it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from polyquant.architectures import translate
from polyquant.codecs import affine_forms
from polyquant.codecs.trellis_forms import floats_of
from polyquant.errors import PlanError
from polyquant.formats.actions import common, survives
from polyquant.formats.protocol import Choice, Context, Planning, Worker
from polyquant.formats.steps import Step
from polyquant.options import NoOptions
from polyquant.recipes.recipe import FALLBACK, Facts, Recipe, Rule
from polyquant.registry import codec
from polyquant.types import (
    F32,
    Blocks,
    Checkpoint,
    Codec,
    Floats,
    Shape,
    TensorMap,
    Translation,
    TrellisCodes,
    Weight,
    as_matrix,
)

__all__ = ["PlainTarget", "folder_warnings", "require_form"]

TORCH_NAMES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
"""Name in config.json of the matrices' type."""


class PlainTarget:
    """A Target (formats.protocol) without `lay_out`, which a subclass adds; it may override the other methods."""

    options: type = NoOptions
    naming = "hf"
    suffix = ""
    smaller: Mapping[str, Any] = MappingProxyType({"recipe": "q4_k_m"})

    def claims(self, requested: Mapping[str, Any]) -> bool:
        """False: no option is specific to this target."""
        return False

    def recipe(self, chosen: Recipe, rules: Sequence[Rule], options: Any, *, named: bool) -> Recipe:
        """Accept any recipe."""
        return chosen.with_rules(rules)

    def refuse(self, options: Any, importance: Mapping[str, F32] | None) -> None:
        """Accept all combinations of options."""

    def for_model(self, source: Checkpoint, translation: Translation, options: Any) -> Any:
        """Return the options unchanged."""
        return options

    def translate(self, source: Checkpoint, recipe: Recipe, options: Any) -> Translation:
        """Translate from GGUF to Hugging Face's names."""
        return translate.to_hf(source, dtype=TORCH_NAMES.get(recipe.base or ""))

    def choose(self, source: Checkpoint, tensor: TensorMap, recipe: Recipe, facts: Facts, options: Any) -> Choice:
        """See the module docstring. Without a recipe, weights of other quantization tools are decoded, or keep their
        codes.
        """
        weights, names = [source[n] for n in tensor.sources], (tensor.target, *tensor.sources)
        have, (name, why) = common(weights), recipe.choose(names, facts)
        if name is None and (decoded := self.decoded(source, weights, tensor)) is not None:
            return decoded
        if self.unquantized(have):
            return Choice(have, "not a float: kept")
        if tensor.is_vector:
            exact = next((r for r in recipe.rules if r.match in names), None)
            return Choice(codec(exact.codec), f"rule {exact.match}") if exact else Choice(self.vector(have), "vector")
        return self.kept(have, tensor) if name is None else self.fitting(name, tensor, why)

    @staticmethod
    def unquantized(have: Codec) -> bool:
        """True for integers, masks, and unknown types of a program: they are copied."""
        return (have.form is Floats and have.name.startswith(("i", "u", "bool"))) or have.name.startswith("ggml.")

    def decoded(self, source: Checkpoint, weights: Sequence[Weight], tensor: TensorMap) -> Choice | None:
        """Without a recipe: floats for codes of other tools that this target cannot store, and for weights that cannot
        keep codes.

        Weights cannot keep their codes if rows change or codecs differ. None for all others.
        """
        if all(affine_forms.only_read(w.codec) for w in weights):
            return self.held(weights, tensor) or Choice(
                codec(affine_forms.floats_of(source.config)), "decoded to floats"
            )
        have, one_codec = common(weights), len({w.codec.name for w in weights}) == 1
        if have.form is Floats or (one_codec and survives(weights, tensor)):
            return None
        if tensor.is_vector:
            return Choice(self.vector(have), "vector")
        return self.floats(have, weights[0].shape)

    def held(self, weights: Sequence[Weight], tensor: TensorMap) -> Choice | None:
        """A codec of this target for the codes of another tool; None if there is none."""
        return None

    @staticmethod
    def floats(have: Codec, shape: Shape) -> Choice:
        """The float type for decoded weights."""
        if have.form is TrellisCodes:
            return Choice(codec(floats_of(have, shape)), "decoded to floats")
        return Choice(codec("bf16" if have.form is Blocks else "f32"), "decoded to floats")

    def vector(self, have: Codec) -> Codec:
        """The codec of norms and biases, which are not worth quantizing."""
        return codec("f32") if have.form is not Floats else have

    def kept(self, have: Codec, tensor: TensorMap) -> Choice:
        """Without a recipe: the source's floats, or the decoded ones."""
        return Choice(have, "kept") if have.form is Floats else self.floats(have, tensor.shape)

    @staticmethod
    def fitting(name: str, tensor: TensorMap, why: str) -> Choice:
        """The codec, or its substitute if the rows are not a multiple of its block."""
        _, k = as_matrix(tensor.shape)
        wanted = codec(name)
        if k % wanted.granule[1] == 0:
            return Choice(wanted, why)
        substitute = codec(FALLBACK.get(name, "f16"))
        if k % substitute.granule[1]:
            substitute = codec("f16")
        return Choice(substitute, f"{name} needs K % {wanted.granule[1]} == 0", instead_of=name)

    def prepare(self, planning: Planning) -> tuple[Planning, list[Step]]:
        """Plan the steps; no model data is needed."""
        steps = planning.steps()
        planning.refuse_lossy(steps)
        return planning, steps

    def warnings(self, planning: Planning, steps: Sequence[Step]) -> tuple[str, ...]:
        """No warnings."""
        return ()

    def method(self, planning: Planning, steps: Sequence[Step]) -> str | None:
        """None: codes are rounded, not searched."""
        return None

    def text(self, steps: Sequence[Step], options: Any) -> str | None:
        """None: there is no calibration text."""
        return None

    def worker(self, context: Context) -> Worker | None:
        """None: every step is a plain conversion."""
        return None


def folder_warnings(files: Collection[str], steps: Sequence[Step]) -> tuple[str, ...]:
    """Warnings for any quantized folder: stacked experts that stay float, a missing config.json."""
    stacks = [s.map.target for s in steps if len(s.map.shape) > 2 and s.target.form is Floats]
    out = [f"{len(stacks)} tensors of more than two dimensions stay float (first: {stacks[0]})"] if stacks else []
    if "config.json" not in files:
        out.append("the source has no config.json: add one to the folder, or nothing can run it")
    return tuple(out)


def require_form(chosen: Recipe, forms: Collection[type], title: str, hint: str) -> None:
    """Raise PlanError if a target cannot store the codec that the recipe has for every matrix."""
    if chosen.base is not None and codec(chosen.base).form not in forms:
        raise PlanError(f"{title} cannot store {chosen.base}", hint=hint)
