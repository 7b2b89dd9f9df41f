"""Which codec a tensor gets, and what that does to it: by the target's own rules, the recipe, or as the source has it."""

from __future__ import annotations

from collections.abc import Sequence

from polyquant.codecs import affine_forms
from polyquant.codecs.trellis_forms import as_exl3, floats_of, same_codes
from polyquant.conversion.steps import MSMODELSLIM, TRELLIS
from polyquant.formats.msmodelslim import target as ascend_target
from polyquant.formats.msmodelslim.options import MsModelSlimOptions
from polyquant.formats.trellis import target as trellis_target
from polyquant.operations import Same
from polyquant.recipes.recipe import FALLBACK, Facts, Recipe
from polyquant.registry import codec
from polyquant.types import (
    Action,
    Affine,
    Blocks,
    Checkpoint,
    Codec,
    Floats,
    TensorMap,
    TrellisCodes,
    Weight,
    as_matrix,
)

__all__ = ["action_of", "choose", "common", "survives"]


def choose(
    source: Checkpoint, tensor: TensorMap, to: str, recipe: Recipe, facts: Facts, ascend: MsModelSlimOptions
) -> tuple[Codec, str]:
    """The target codec of one tensor and the reason that the plan prints."""
    weights = [source[name] for name in tensor.sources]
    return (
        _kept_codes(source, tensor, to, recipe, facts)
        or _remade(weights, tensor, to, recipe, facts)
        or _chosen(common(weights), tensor, to, recipe, facts, ascend)
    )


def common(weights: Sequence[Weight]) -> Codec:
    """The codec of all sources; where they differ the widest float type of floats, else the first quantized one."""
    codecs = {w.codec.name: w.codec for w in weights}
    if len(codecs) == 1 or all(c.form is Floats for c in codecs.values()):
        return codec("f32") if len(codecs) > 1 else weights[0].codec
    return next(c for c in codecs.values() if c.form is not Floats)


def _remade(
    weights: Sequence[Weight], tensor: TensorMap, to: str, recipe: Recipe, facts: Facts
) -> tuple[Codec, str] | None:
    """Quantized weights that cannot keep their codes, since their rows change or their codecs differ, where no recipe says what they become: floats."""
    have = common(weights)
    alike = len({w.codec.name for w in weights}) == 1
    if (
        have.form is Floats
        or (alike and survives(weights, tensor))
        or recipe.choose((tensor.target, *tensor.sources), facts)[0] is not None
    ):
        return None
    if tensor.is_vector:
        return _plain(have, to), "vector"
    if have.form is TrellisCodes:
        return codec(floats_of(have, weights[0].shape)), "decoded to floats"
    return codec("bf16" if have.form is Blocks else "f32"), "decoded to floats"


def _chosen(
    have: Codec, tensor: TensorMap, to: str, recipe: Recipe, facts: Facts, ascend: MsModelSlimOptions
) -> tuple[Codec, str]:
    names = (tensor.target, *tensor.sources)
    if (have.form is Floats and have.name.startswith(("i", "u", "bool"))) or have.name.startswith("ggml."):
        return have, "not a float: kept"
    if to == TRELLIS:
        return trellis_target.choose(have, tensor, recipe, facts)
    if tensor.is_vector:
        exact = next((r for r in recipe.rules if r.match in names), None)
        return (codec(exact.codec), f"rule {exact.match}") if exact else (_plain(have, to), "vector")
    if to == MSMODELSLIM:
        return ascend_target.choose(have, tensor, recipe, facts, ascend)
    name, why = recipe.choose(names, facts)
    if name is None:
        return _keep(have, tensor, to)
    return _fitting(name, tensor, why)


def _kept_codes(
    source: Checkpoint, tensor: TensorMap, to: str, recipe: Recipe, facts: Facts
) -> tuple[Codec, str] | None:
    """Weights of quantized folders that no recipe changes, outside of msModelSlim: as ggml blocks where one holds their codes, else decoded to the model's type."""
    weights = [source[name] for name in tensor.sources]
    if (
        to == MSMODELSLIM
        or not all(affine_forms.only_read(w.codec) for w in weights)
        or recipe.choose((tensor.target, *tensor.sources), facts)[0] is not None
    ):
        return None
    if to == "gguf" and survives(weights, tensor):
        name = affine_forms.blocks_of(weights[0]) if len(weights) == 1 else _blocks_of_all(weights)
        if name is not None:
            return codec(name), "codes kept"
    return codec(affine_forms.floats_of(source.config)), "decoded to floats"


def _blocks_of_all(weights: Sequence[Weight]) -> str | None:
    """The smallest ggml type that holds the codes of all; None where there is none."""
    types = ("q4_0", "q4_1", "q8_0")
    return next((t for t in types if all(affine_forms.same_codes(w, codec(t)) for w in weights)), None)


def _plain(have: Codec, to: str) -> Codec:
    """Vectors are not worth quantizing: float32 in GGUF, as they are elsewhere."""
    return codec("f32") if to == "gguf" or have.form is not Floats else have


def _keep(have: Codec, tensor: TensorMap, to: str) -> tuple[Codec, str]:
    """No recipe: the source's own codec where the target format has it, else the nearest that loses nothing or least."""
    if to == "gguf":
        if have.name.startswith("hf_bitnet") or tensor.ternarize:
            return codec("i2_s.x86"), "ternary"
        if have.form is not TrellisCodes:
            return have, "kept"
    if have.form is Floats:
        return have, "kept"
    if have.form is TrellisCodes:
        if to == "hf" and (exl3 := as_exl3(have, tensor.shape)) is not None:
            return exl3, "codes kept"
        return codec(floats_of(have, tensor.shape)), "decoded to floats"
    return codec("bf16" if have.form is Blocks else "f32"), "decoded to floats"


def _fitting(name: str, tensor: TensorMap, why: str) -> tuple[Codec, str]:
    """The codec, or its substitute where the rows are no multiple of its block."""
    _, k = as_matrix(tensor.shape)
    found = codec(name)
    if k % found.granule[1] == 0:
        return found, why
    substitute = codec(FALLBACK.get(name, "f16"))
    if k % substitute.granule[1]:
        substitute = codec("f16")
    return substitute, f"{name} needs K % {found.granule[1]} == 0"


def survives(weights: Sequence[Weight], tensor: TensorMap) -> bool:
    """True if the target's rows are rows of its sources as they are stored. A vector of numbers that only change places counts as such."""
    op, shapes = tensor.op, [w.shape for w in weights]
    if isinstance(op, Same):
        return True
    forms = {w.codec.form for w in weights}
    if forms == {Floats} and len(tensor.shape) < 2 and op.moves:
        return True
    return TrellisCodes not in forms and op.keeps_rows(shapes)  # those are rotated as a whole


def action_of(weights: Sequence[Weight], target: Codec, tensor: TensorMap) -> Action:
    """What a step does to its sources."""
    if tensor.ternarize:
        return Action.QUANTIZE
    if survives(weights, tensor):
        apart = len(weights) == 1 or target.form is not Affine or target.row_sliced
        if apart and all(w.codec.name == target.name for w in weights):
            return Action.COPY
        if all(_same_codes(w, target, tensor) for w in weights):
            return Action.TRANSCODE
    if all(w.codec.form is Floats for w in weights):
        return Action.TRANSCODE if target.form is Floats else Action.QUANTIZE
    return Action.DEQUANTIZE if target.form is Floats else Action.REQUANTIZE


def _same_codes(weight: Weight, target: Codec, tensor: TensorMap) -> bool:
    """True if the target holds the codes as they are."""
    have = weight.codec
    if Affine in (have.form, target.form):
        return (len(tensor.sources) == 1 or target.row_sliced) and affine_forms.same_codes(weight, target)
    if have.form is target.form and have.form not in (Blocks, TrellisCodes):
        return True
    return same_codes(have, target, tensor.shape)
