"""What will be done, decided before any work: each tensor's codec, action and exact bytes, and where every byte will lie.

    open -> translate (names, row order, metadata) -> recipe and target (codecs) -> prepare (what needs data) -> lay out (headers, offsets)

Everything that can be refused is refused here: unreadable input, codecs that do not fit, lossy steps without leave.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from polyquant.calibration.importance import unreached, unreached_notice
from polyquant.capabilities import Fitted, MayOnlyRead, WholeNumbers, claims
from polyquant.conversion.notices import mixed_stacks, rule_notices
from polyquant.conversion.order import model_order
from polyquant.conversion.steps import Plan
from polyquant.errors import CodecError, InputError, PlanError
from polyquant.formats.actions import action_of, common
from polyquant.formats.protocol import Choice, Format, OnTensor, Planning, Target
from polyquant.formats.steps import Step, importance_shapes
from polyquant.no_collection import no_collection
from polyquant.recipes.reading import load_recipe, uniform
from polyquant.recipes.recipe import Facts, Recipe, Rule
from polyquant.registry import codec
from polyquant.types import F32, Action, Checkpoint, TensorMap, TensorSpec, Translation, Weight

__all__ = ["make_plan"]


def make_plan(
    source: Checkpoint,
    form: Format,
    to: str,
    target: Target,
    options: Any,
    *,
    codec: str | None = None,
    recipe: str | None = None,
    rules: Sequence[Rule] = (),
    requantize: bool = False,
    allow_unknown: bool = False,
    importance: Mapping[str, F32] | None = None,
    on_tensor: OnTensor | None = None,
) -> Plan:
    """Decide everything. form: the source's format. options: of `target`, which writes the format `to`. codec: one for all matrices; recipe: a mix by name or file; neither: keep the source's codecs.

    on_tensor: told (done, all, name) of the tensors whose sensitivity is measured. Raises PlanError for lossy steps without `requantize`, for
    models that are not fully known without `allow_unknown`, UnknownNameError, InputError.
    """
    if codec and recipe:
        raise PlanError("give a codec or a recipe, not both")
    base = uniform(codec) if codec else load_recipe(recipe) if recipe else Recipe("as the source")
    chosen = target.recipe(base, rules, options, named=bool(codec or recipe))
    target.refuse(options, importance)
    translation = _translate(source, form, target, chosen, options)
    if translation.unknown and not allow_unknown:
        raise PlanError(translation.unknown[0], file=source.path, hint="--allow-unknown writes it all the same")
    options = target.for_model(source, translation, options)
    planning = Planning(
        source, target, translation, chosen, _facts(source, translation, importance), options,
        lambda tensor, choose: _step(source, tensor, choose),
        tuple(_constant(name, values) for name, values in translation.constants.items()),
        requantize, on_tensor,
    )  # fmt: skip
    planning, steps = target.prepare(planning)
    warnings = (*source.notes, *translation.unknown, *translation.warnings, *_mismatches(steps, importance))
    warnings += (*mixed_stacks(steps), *rule_notices(rules, planning.facts, steps))
    with no_collection():
        layout = target.lay_out(planning, steps)
    return Plan(
        source, to, target, planning.options, planning.recipe, translation, tuple(steps), layout,
        (*warnings, *target.warnings(planning, steps)), importance or {}, target.method(planning, steps),
        target.text(steps, planning.options),
    )  # fmt: skip


@no_collection()
def _translate(source: Checkpoint, form: Format, target: Target, recipe: Recipe, options: Any) -> Translation:
    """Names, metadata and files as they are where source and target name things alike, else in the target's words.

    Tensors are in the model's order, but for GGUF that stays GGUF: its writers sort, and what copies keeps their order.
    """
    found = form.carry(source) if source.naming == target.naming else target.translate(source, recipe, options)
    return found if source.naming == target.naming == "gguf" else replace(found, tensors=model_order(found.tensors))


def _facts(source: Checkpoint, translation: Translation, importance: Mapping[str, F32] | None) -> Facts:
    """Numbers for the rules, from the metadata that the target will carry."""

    def number(key: str) -> int:
        found = translation.metadata.get(f"{translation.architecture}.{key}")
        return int(found.value) if found is not None and isinstance(found.value, int) else 0

    heads, kv = number("attention.head_count"), number("attention.head_count_kv")
    names = {t.target for t in translation.tensors}
    return Facts(
        layers=number("block_count"),
        gqa=heads // kv if heads and kv else 1,
        tied="output.weight" not in names,
        importance=bool(importance),
    )


def _step(source: Checkpoint, tensor: TensorMap, choose: Callable[[], Choice]) -> Step:
    """Raises PlanError for a codec that cannot hold the tensor."""
    weights = [source[name] for name in tensor.sources]
    _refuse_shapes(source, weights, tensor)
    try:
        target, why = choose()
        if claims(target, Fitted):  # type: ignore[type-abstract]
            target.fit(tensor.shape)  # its options must be known now, not when the work gets there
        nbytes = sum(s.nbytes for s in target.specs(tensor.shape).values())
        action = action_of(weights, target, tensor)
        _refuse_unwritable(weights, target, action)
    except CodecError as problem:
        raise PlanError(
            str(problem),
            file=source.path,
            tensor=tensor.origin,
            hint=None if problem.hint else f"give it another codec: --rule '{tensor.target}=f16'",
        ) from None
    specs = tuple(TensorSpec(w.name, w.shape, w.codec) for w in weights)
    return Step(tensor, common(weights), target, action, why, nbytes, sources=specs)


def _refuse_unwritable(weights: Sequence[Weight], target: Codec, action: Action) -> None:
    """Raises CodecError for codes that nothing makes of these weights."""
    if action in (Action.QUANTIZE, Action.REQUANTIZE) and claims(target, MayOnlyRead) and not target.writable:
        raise CodecError(f"{target} can be read, not written", hint="choose another codec, e.g. q4_k")
    if _whole(target) and action is not Action.COPY and not all(_whole(w.codec) for w in weights):
        raise CodecError(f"{target} holds integers, and the weights are floats", hint="choose a float codec, e.g. bf16")


def _whole(codec: Codec) -> bool:
    return claims(codec, WholeNumbers) and codec.whole


def _refuse_shapes(source: Checkpoint, weights: Sequence[Weight], tensor: TensorMap) -> None:
    """Raises InputError for sources that do not give the shape that the translation promises."""
    found = tensor.op.shape([w.shape for w in weights], tensor.target)
    if found != tensor.shape:
        raise InputError(
            "its sources give another shape", file=source.path, tensor=tensor.target, expected=list(tensor.shape), found=list(found)
        )  # fmt: skip


def _constant(name: str, values: F32) -> Step:
    return Step(
        TensorMap(name, (), values.shape, keep_float=True),
        None,
        codec("f32"),
        Action.COPY,
        "constant of the architecture",
        values.nbytes,
    )


def _mismatches(steps: Sequence[Step], importance: Mapping[str, F32] | None) -> tuple[str, ...]:
    """Warnings about an importance file that does not belong to this model. Raises PlanError for rows of another length, or another number of experts."""
    if not importance:
        return ()
    for s in steps:
        found = importance.get(s.map.target)
        if found is not None and found.shape not in importance_shapes(s.map.shape):
            raise PlanError(
                "importance has another length than the tensor's rows",
                tensor=s.map.target,
                expected=" or ".join(str(list(x)) for x in importance_shapes(s.map.shape)),
                found=list(found.shape),
            )
    named = {s.map.target for s in steps}
    missing = [
        s.map.target
        for s in steps
        if s.action is Action.QUANTIZE and not s.map.is_vector and s.map.target not in importance
    ]
    out = []
    mixed = [s.map.target for s in steps if s.searches and getattr(importance.get(s.map.target), "ndim", 1) > 1]
    if mixed:
        out.append(
            f"{len(mixed)} stacks take the mean importance of their experts: their codec mixes the rows of all (first: {mixed[0]})"
        )
    if left := {s.map.target: none for s in steps if (none := unreached(importance.get(s.map.target)))}:
        first, experts = next(iter(left.items()))
        out.append(f"{unreached_notice(left)} (first: {_listed(experts)} of {first})")
    if strangers := [n for n in importance if n not in named]:
        out.append(f"importance names {len(strangers)} tensors that the model lacks, e.g. {strangers[0]}")
    if missing:
        out.append(f"{len(missing)} quantized tensors have no importance, e.g. {missing[0]}")
    return tuple(out)


def _listed(experts: Sequence[int], most: int = 8) -> str:
    """Expert 3, experts 3, 7 and 11 ..."""
    more = f" and {len(experts) - most} more" if len(experts) > most else ""
    return f"expert{'s' * (len(experts) > 1)} {', '.join(map(str, experts[:most]))}{more}"
