"""The Trellis v3 target: which tensors are quantized, with which codec, and their stated origin."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from polyquant.calibration.samples import check_text
from polyquant.codecs.trellis import Trellis
from polyquant.codecs.trellis_forms import exact_trellis
from polyquant.errors import PlanError
from polyquant.formats.actions import common
from polyquant.formats.linears import is_linear
from polyquant.formats.plain_target import PlainTarget, folder_warnings
from polyquant.formats.protocol import Choice, Context, Planning, Worker
from polyquant.formats.steps import Step
from polyquant.formats.trellis.config import Origin
from polyquant.formats.trellis.layout import lay_out
from polyquant.formats.trellis.options import METHODS, TrellisOptions
from polyquant.recipes.reading import uniform
from polyquant.recipes.recipe import Facts, Recipe, Rule
from polyquant.registry import codec
from polyquant.types import (
    F32,
    Action,
    Blocks,
    Checkpoint,
    Codec,
    Floats,
    Layout,
    Shape,
    TensorMap,
    TrellisCodes,
    Weight,
)

__all__ = ["TrellisTarget", "keep", "method_of", "origin"]

_BYTES = {"float32": ("f32", 4), "float16": ("f16", 2), "bfloat16": ("bf16", 2)}


def _recipe(chosen: Recipe, options: TrellisOptions, rules: Sequence[Rule], *, named: bool) -> Recipe:
    """The recipe for a Trellis target.

    named: `chosen` comes from --codec or --recipe; else it follows from the bits, or the source's codes are kept. A
    rule with just `trellis.K` uses window and codebook of the options. Raises PlanError.
    """
    if named and options.sizes:
        raise PlanError(
            f"{options.sizes} and --codec or --recipe are mutually exclusive: both set bits and window",
            hint=f"omit {options.sizes}, or use only options: --bits 3 --effort max",
        )
    options.refuse()
    bits = options.bits if options.target_bpw is None else 4  # allocated per tensor later
    if bits is not None:
        chosen = uniform(options.codec_name(bits))
    elif options.given and not rules and not named:
        raise PlanError(f"{options.given} needs a number of bits", hint="add --bits 3")
    if chosen.base is not None and codec(chosen.base).form not in (TrellisCodes, Floats):
        raise PlanError(f"a Trellis folder cannot store {chosen.base}", hint="choose --bits 2 to --bits 8")
    return chosen.with_rules([_with_window(r, options) for r in rules])


def _with_window(rule: Rule, options: TrellisOptions) -> Rule:
    bits = rule.codec.removeprefix("trellis.")
    return replace(rule, codec=options.codec_name(int(bits))) if bits.isdecimal() and bits != rule.codec else rule


def _choose(have: Codec, tensor: TensorMap, recipe: Recipe, facts: Facts) -> Choice:
    """Choose a codec: rules may name any matrix; the recipe's codec is for linear layers; the rest is kept."""
    names, shape = (tensor.target, *tensor.sources), tensor.shape
    rule = next((r for r in recipe.rules if len(shape) == 2 and r.applies(names, facts)), None)
    if rule is not None:
        return Choice(codec(rule.codec), f"rule {rule.match}")
    if recipe.base is None or not is_linear(tensor.target, shape):
        return keep(have, shape)
    wanted = codec(recipe.base)
    return Choice(wanted, "") if wanted.form is TrellisCodes else keep(have, shape)


def keep(have: Codec, shape: Shape) -> Choice:
    """The codec of an unquantized tensor: its trellis codes, its float type, or decoded floats."""
    if have.form is TrellisCodes:
        return Choice(exact_trellis(have, shape), "codes kept")
    if have.form is Floats:
        return Choice(have, "float")
    return Choice(codec("bf16" if have.form is Blocks else "f32"), "decoded to floats")


def origin(source: Checkpoint, weight: Weight, action: Action, count: int | None = None) -> Origin:
    """The origin of a quantized weight for `quantization_config.json`.

    Unchanged codes keep the error stated in their file, or 0, since this step loses nothing, and the stated original,
    or the size in config.json's dtype. count: number of values of the target, if it consists of a part of the weight,
    or of others like it.
    """
    if action not in (Action.COPY, Action.TRANSCODE):
        size = math.prod(weight.shape)
        return Origin(weight.nbytes * (size if count is None else count) // max(1, size), weight.codec.name)
    stated = _stated(source, weight.name)
    mse, nbytes, dtype = (stated.get(key) for key in ("mse", "original_bytes", "original_dtype"))
    word, size = _BYTES.get(str(source.config.get("dtype", source.config.get("torch_dtype"))), ("bf16", 2))
    if not (isinstance(nbytes, int) and 0 < nbytes < 1 << 60 and isinstance(dtype, str)):
        nbytes, dtype = size * math.prod(weight.shape), word
    return Origin(nbytes, dtype[:40], _number(mse) or 0.0)


def _states_error(source: Checkpoint, name: str) -> bool:
    """True if the source states the error of a weight."""
    return _number(_stated(source, name).get("mse")) is not None


def _number(value: object) -> float | None:
    """A mean squared error stated in a file; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e90:
        return None
    return float(value)


def _stated(source: Checkpoint, name: str) -> Mapping[str, Any]:
    tensors = source.metadata.get("tensor_metadata")
    entry = tensors.get(name) if isinstance(tensors, Mapping) else None
    return entry if isinstance(entry, Mapping) else {}


def method_of(source: Checkpoint, actions: Sequence[Action], *, calibrated: bool) -> str:
    """`quantization_method`: how the codes were searched; if all codes are unchanged, as stated in the source."""
    searched = any(a in (Action.QUANTIZE, Action.REQUANTIZE) for a in actions)
    stated = source.metadata.get("quantization_method")
    if not searched and stated in METHODS:
        return str(stated)
    carried = not searched and any(w.codec.name.startswith("exl3") for w in source.values())
    return "trellis_ldlq" if calibrated or carried else "trellis_viterbi"


def _layout_options(source: Checkpoint, steps: Sequence[Step], options: TrellisOptions) -> dict[str, Any]:
    """Options for the layout of a Trellis folder."""
    quantized = [s for s in steps if isinstance(s.target, Trellis)]
    origins = {s.map.target: origin(source, source[s.map.sources[0]], s.action, s.weights) for s in quantized}
    method = method_of(source, [s.action for s in quantized], calibrated=options.calibrated)
    return {"origins": origins, "method": method, "target_bits": options.bits}


def _warnings(source: Checkpoint, files: Collection[str], steps: Sequence[Step]) -> tuple[str, ...]:
    """Warnings for users of the folder: unknown errors, tensors that stay float, a missing config.json."""
    out = []
    carried = [s.map.sources[0] for s in steps if isinstance(s.target, Trellis) and not s.searches]
    without_error = [name for name in carried if not _states_error(source, name)]
    if without_error:
        out.append(
            f"{len(without_error)} weights of the source have no stated mean squared error (first: "
            f"{without_error[0]}); their codes are kept, and mse is 0: the loss of this step"
        )
    return (*out, *folder_warnings(files, steps))


class TrellisTarget(PlainTarget):
    """The target: matrices of linear layers as trellis codes, the rest as floats."""

    options = TrellisOptions
    smaller: Mapping[str, Any] = MappingProxyType({"bits": 4})

    def claims(self, requested: Mapping[str, Any]) -> bool:
        """True for bits, a method, calibration, or a codec of the family."""
        return str(requested.get("codec", "")).startswith("trellis.") or bool(
            requested.keys() & {"bits", "target_bpw", "method", "calibration"}
        )

    def recipe(self, chosen: Recipe, rules: Sequence[Rule], options: TrellisOptions, *, named: bool) -> Recipe:
        """Bits, effort and codebook become the codec of every linear layer."""
        return _recipe(chosen, options, rules, named=named)

    def refuse(self, options: TrellisOptions, importance: Mapping[str, F32] | None) -> None:
        """Raise PlanError if there are both Hessians and an importance matrix."""
        if options.calibrated and importance:
            raise PlanError("--importance and --calibration are mutually exclusive", hint="omit --importance")
        check_text(options.calibration)

    def choose(
        self, source: Checkpoint, tensor: TensorMap, recipe: Recipe, facts: Facts, options: TrellisOptions
    ) -> Choice:
        """Choose a codec: rules may name any matrix; the recipe's codec is for linear layers."""
        weights, names = [source[n] for n in tensor.sources], (tensor.target, *tensor.sources)
        have = common(weights)
        if recipe.choose(names, facts)[0] is None and (decoded := self.decoded(source, weights, tensor)) is not None:
            return decoded
        if self.unquantized(have):
            return Choice(have, "not a float: kept")
        return _choose(have, tensor, recipe, facts)

    def prepare(self, planning: Planning) -> tuple[Planning, list[Step]]:
        """Plan the steps; with --target-bpw allocate bits with the least damage."""
        planning, steps = super().prepare(planning)
        for step in steps if planning.options.calibrated else ():
            if step.searches:
                step.inputs  # noqa: B018 - raises if it cannot be calibrated
        if planning.options.target_bpw is not None:
            from polyquant.formats.trellis.allocation import with_allocation

            steps, how = with_allocation(planning, steps)
            planning = planning.with_changes(named=how)
        return planning, steps

    def lay_out(self, planning: Planning, steps: Sequence[Step]) -> Layout:
        """Lay out shards, index, and quantization_config.json with a slot for each error."""
        options = _layout_options(planning.source, steps, planning.options)
        if planning.options.shard_bytes is not None:
            options["shard_bytes"] = planning.options.shard_bytes
        return lay_out([s.spec for s in steps], planning.translation.files, **options)

    def warnings(self, planning: Planning, steps: Sequence[Step]) -> tuple[str, ...]:
        """Warn about unknown errors, tensors that stay float, a missing config.json."""
        return _warnings(planning.source, planning.translation.files, steps)

    def method(self, planning: Planning, steps: Sequence[Step]) -> str | None:
        """quantization_method."""
        actions = [s.action for s in steps if isinstance(s.target, Trellis)]
        return method_of(planning.source, actions, calibrated=planning.options.calibrated)

    def text(self, steps: Sequence[Step], options: TrellisOptions) -> str | None:
        """The calibration text, if codes are searched with Hessians."""
        return options.calibration if options.calibrated and any(s.searches for s in steps) else None

    def worker(self, context: Context) -> Worker | None:
        """A worker that searches codes."""
        from polyquant.formats.trellis.work import TrellisWorker

        return TrellisWorker(context, self.text(context.steps, context.options))
