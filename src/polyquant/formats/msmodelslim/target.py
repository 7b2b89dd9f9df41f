"""Write an msModelSlim folder."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from polyquant.calibration.samples import check_text
from polyquant.capabilities import MayFixInputs, claims
from polyquant.codecs.msmodelslim import MsModelSlim
from polyquant.errors import PlanError
from polyquant.formats.actions import common
from polyquant.formats.msmodelslim import choices, settle
from polyquant.formats.msmodelslim.keep import with_proposal
from polyquant.formats.msmodelslim.layout import lay_out
from polyquant.formats.msmodelslim.options import AUTO, MsModelSlimOptions
from polyquant.formats.msmodelslim.ranges import read_ranges
from polyquant.formats.msmodelslim.work import MsModelSlimWorker
from polyquant.formats.plain_target import PlainTarget, require_form
from polyquant.formats.protocol import Choice, Context, Planning, Worker
from polyquant.formats.steps import Step
from polyquant.recipes.recipe import Facts, Recipe, Rule
from polyquant.types import F32, Action, Affine, Checkpoint, Floats, Layout, TensorMap, Translation

__all__ = ["MsModelSlimTarget"]


class MsModelSlimTarget(PlainTarget):
    """The target: linear layers as int8 and int4 codes, in one of three dialects."""

    options = MsModelSlimOptions
    smaller: Mapping[str, Any] = MappingProxyType({"codec": "w8a16"})

    def claims(self, requested: Mapping[str, Any]) -> bool:
        """True for its codecs, and options that no other target has."""
        own_options = {"kv", "smooth", "dialect", "keep", "keep_error", "exact_tool", "ranges"}
        return str(requested.get("codec", "")).startswith(("w8a", "w4a")) or bool(requested.keys() & own_options)

    def recipe(self, chosen: Recipe, rules: Sequence[Rule], options: MsModelSlimOptions, *, named: bool) -> Recipe:
        """Accept affine codes and floats only."""
        options.refuse()
        require_form(chosen, (Affine, Floats), "an msModelSlim folder", "choose --codec w8a16, w8a8, w8a8.dynamic, ...")
        return chosen.with_rules(rules)

    def refuse(self, options: MsModelSlimOptions, importance: Mapping[str, F32] | None) -> None:
        """Raise PlanError for an importance matrix, which no codec of this format uses."""
        if importance:
            raise PlanError("msModelSlim codecs do not use importance", hint="use --calibration FILE --effort max")
        check_text(options.calibration)

    def for_model(
        self, source: Checkpoint, translation: Translation, options: MsModelSlimOptions
    ) -> MsModelSlimOptions:
        """Load the ranges and determine the model's compute type."""
        if isinstance(options.ranges, str | os.PathLike):
            options = replace(options, ranges=read_ranges(options.ranges, options.dialect))
        return choices.with_dtype(source, options, translation)

    def choose(
        self, source: Checkpoint, tensor: TensorMap, recipe: Recipe, facts: Facts, options: MsModelSlimOptions
    ) -> Choice:
        """Choose a codec: rules may name any matrix; the recipe's codec is for linear layers not in --keep."""
        have = common([source[n] for n in tensor.sources])
        if self.unquantized(have):
            return Choice(have, "not a float: kept")
        if tensor.is_vector:
            return super().choose(source, tensor, recipe, facts, options)
        chosen = choices.choose(have, tensor, recipe, facts, options)
        biased = f"{choices.module_of(tensor.source or '')}.bias" in source
        return choices.without_grid(chosen, tensor, options) if biased and claims(have, MayFixInputs) else chosen  # type: ignore[type-abstract]

    def prepare(self, planning: Planning) -> tuple[Planning, list[Step]]:
        """Plan the steps: --keep auto, then biases, norms and cache scales of the dialect."""
        steps = planning.steps()
        if AUTO in planning.options.keep:
            propose = partial(with_proposal, planning.source, steps, planning.options, planning.on_tensor)
            options, how = planning.measure("keep", propose)
            planning = planning.with_changes(options=options, named=f"{planning.recipe.name}, {how}")
            steps = planning.steps()
        lossy = next((s for s in steps if s.action is Action.REQUANTIZE), None)
        if lossy is not None and isinstance(lossy.target, MsModelSlim):
            planning.refuse_lossy(
                steps,
                "convert without a codec to keep the codes; else start from the float model, or pass --requantize",
            )
        planning.refuse_lossy(steps)
        return planning, settle.settled(planning.source, steps, planning.options)

    def lay_out(self, planning: Planning, steps: Sequence[Step]) -> Layout:
        """Lay out shards, index, description and config.json of the dialect."""
        options = choices.layout_options(planning.source, planning.options)
        if planning.options.shard_bytes is not None:
            options["shard_bytes"] = planning.options.shard_bytes
        return lay_out([s.spec for s in steps], planning.translation.files, **options)

    def warnings(self, planning: Planning, steps: Sequence[Step]) -> tuple[str, ...]:
        """Warn about fused layers of two types, differing norms, a missing config.json."""
        return settle.warnings(planning.source, planning.translation.files, steps, planning.options.smooth)

    def text(self, steps: Sequence[Step], options: MsModelSlimOptions) -> str | None:
        """The calibration text for ranges, smoothing, caches and searches."""
        return options.calibration

    def worker(self, context: Context) -> Worker | None:
        """A worker that quantizes with the calibration results."""
        return MsModelSlimWorker(context)
