"""Choose the codec of each tensor of an msModelSlim folder, and the options of its dialect."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from polyquant.codecs.affine_forms import exact_msmodelslim
from polyquant.codecs.msmodelslim import TYPES, MsModelSlim
from polyquant.errors import PlanError
from polyquant.formats.linears import is_linear
from polyquant.formats.msmodelslim.describe import FLOAT
from polyquant.formats.msmodelslim.options import MsModelSlimOptions
from polyquant.formats.protocol import Choice
from polyquant.formats.steps import Step
from polyquant.recipes.recipe import Facts, Recipe
from polyquant.registry import codec
from polyquant.storage import strict_json
from polyquant.types import Checkpoint, Codec, Floats, TensorMap, Translation

__all__ = [
    "bias_type",
    "choose",
    "completed",
    "kept",
    "layout_options",
    "module_of",
    "ranges_of",
    "with_dtype",
    "without_grid",
]

_KEPT = "codes kept"
_DTYPES = {"float16": "f16", "half": "f16", "bfloat16": "bf16", "float32": "f32", "float": "f32"}
_ONE_SUM = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
"""Linear layers of W4A8_DYNAMIC with one scale_bias per row; those that are distributed over devices have 16."""


def with_dtype(source: Checkpoint, options: MsModelSlimOptions, translation: Translation) -> MsModelSlimOptions:
    """The options with the model's compute type: from config.json, else the most common float type.

    Raises PlanError for a model with any other type.
    """
    config: Mapping[str, Any] = {}
    if "config.json" in translation.files:
        config = strict_json.typed(
            strict_json.parse(translation.files["config.json"], file="config.json"), dict, "config.json"
        )
    inner = config.get("text_config")
    places = (config, inner if isinstance(inner, dict) else {})
    stated = next((p[key] for p in places for key in ("torch_dtype", "dtype") if isinstance(p.get(key), str)), None)
    if stated is None:
        return replace(options, dtype=_most(source))
    if stated.removeprefix("torch.") not in _DTYPES:
        raise PlanError(
            "the model's compute type is not supported by msModelSlim",
            file="config.json",
            expected="float16, bfloat16 or float32",
            found=stated,
        )
    return replace(options, dtype=_DTYPES[stated.removeprefix("torch.")])


def _most(source: Checkpoint) -> str:
    """The most common of the three float types; bfloat16 if there is none."""
    nbytes: Counter[str] = Counter()
    for w in source.values():
        if w.codec.name in _DTYPES.values():
            nbytes[w.codec.name] += w.nbytes
    return nbytes.most_common(1)[0][0] if nbytes else "bf16"


def bias_type(options: MsModelSlimOptions) -> str:
    """The codec of float biases of quantized layers: float32 in v1, else the model's type."""
    return "f32" if options.dialect == "v1" else options.dtype


def module_of(name: str) -> str:
    """The linear layer of a weight: X.weight -> X."""
    return name.removesuffix(".weight")


# ------------------------------------------------------------ codecs


def choose(have: Codec, tensor: TensorMap, recipe: Recipe, facts: Facts, options: MsModelSlimOptions) -> Choice:
    """Choose a codec: rules may name any matrix; the recipe's codec is for linear layers not in --keep; the rest is
    kept.
    """
    names, shape = (tensor.target, tensor.source), tensor.shape
    linear = is_linear(tensor.target, shape)
    if linear and (glob := kept(tensor.target, options.keep)) is not None:
        return Choice(_float(have, options), f"--keep {glob}")
    rule = next((r for r in recipe.rules if len(shape) == 2 and r.applies(names, facts)), None)
    wanted = (
        codec(rule.codec) if rule is not None else codec(recipe.base) if recipe.base is not None and linear else None
    )
    why = f"rule {rule.match}" if rule is not None else ""
    if isinstance(wanted, MsModelSlim):
        return Choice(completed(wanted, tensor.target, options), why)
    if wanted is not None and (rule is not None or have.form is not Floats):
        return Choice(wanted, why)
    if (exact := exact_msmodelslim(have, shape)) is not None and (linear or isinstance(have, MsModelSlim)):
        return Choice(completed(exact, tensor.target, options), _KEPT)
    if len(shape) > 2:
        return Choice(_float(have, options), "a stack: the format supports only matrices")
    return Choice(_float(have, options), "float" if have.form is Floats else "decoded to floats")


def without_grid(chosen: Choice, tensor: TensorMap, options: MsModelSlimOptions) -> Choice:
    """The same codes without the grid of the inputs, for a layer with a bias: a static type would store it in
    quant_bias, which is computed from codes alone.
    """
    target = chosen.codec
    if not isinstance(target, MsModelSlim) or not target.static or chosen.why != _KEPT:
        return chosen
    why = "codes kept; the layer has a bias, so the quantization of its inputs is not"
    return Choice(completed(MsModelSlim("w8a16"), tensor.target, options), why)


def kept(name: str, globs: Sequence[str]) -> str | None:
    """The first glob that matches a weight or its layer."""
    return next((g for g in globs if fnmatchcase(name, g) or fnmatchcase(module_of(name), g)), None)


def _float(have: Codec, options: MsModelSlimOptions) -> Codec:
    return have if have.form is Floats else codec(options.dtype)


def completed(wanted: MsModelSlim, name: str, options: MsModelSlimOptions) -> MsModelSlim:
    """Complete the codec for the dialect and the model's type. Raises PlanError for a type that the dialect does not
    support.

    Scales: float32 in v1 and per group, else in the model's type. Static types: deq_scale as int64 unless the model is
    bfloat16. 4 bits: one code per byte in v0.
    """
    v1, four = options.dialect == "v1", wanted.bits == 4
    packing = "" if options.dialect == "v0" or not four else "k" if wanted.kind == "w4a16" and not wanted.group else "n"
    small = wanted.kind == "w4a8.dynamic"
    if small and options.dialect == "v0":
        raise PlanError(
            "the v0 dialect does not support W4A8_DYNAMIC", tensor=name, hint="add --dialect ascendv1, or v1"
        )
    return wanted.configure(
        dtype="f32" if v1 or wanted.group or small else options.dtype,
        grid="",
        flat=False,
        wide=wanted.static and options.dtype != "bf16",
        scales=wanted.kind == "w8a8.mix" or (wanted.kind == "w8a8" and not v1),
        packing=packing,
        second=small and bool(wanted.group),
        sums=(wanted.sums or _sums(name)) if small else 0,
    )


def _sums(name: str) -> int:
    return (
        16
        if any(word in name for word in ("down_proj", "o_proj")) and not any(word in name for word in _ONE_SUM)
        else 1
    )


def ranges_of(options: MsModelSlimOptions, step: Step) -> tuple[float, float] | None:
    """The range of a layer's inputs from --ranges, by its name in the folder or in the source.

    The experts of a stack are named `stack[3]` in the source.
    """
    given = options.input_ranges
    named = module_of(step.map.target)
    return given[named] if named in given else given.get(module_of(step.inputs))


def layout_options(source: Checkpoint, options: MsModelSlimOptions) -> dict[str, Any]:
    """Options for the layout of the folder."""
    out: dict[str, Any] = {"dialect": options.dialect}
    if source.format == "msmodelslim":
        types = source.metadata.get("types", {})
        unknown = {name: word for name, word in types.items() if word not in (FLOAT, "C8", *TYPES.values())}
        out |= {"words": unknown, "carried": {key: value for key, value in source.metadata.items() if key != "types"}}
    return out
