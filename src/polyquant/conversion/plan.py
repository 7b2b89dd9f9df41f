"""Plan a conversion before any work: each tensor's codec, action and exact size, and the place of every byte.

    open -> translate (names, row order, metadata) -> recipe and target (codecs) -> prepare (steps that need data) ->
    lay out (headers, offsets)

Everything that can be rejected is rejected here: unreadable input, codecs that do not fit, lossy steps without
--requantize.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from polyquant.calibration.importance import unreached, unreached_notice
from polyquant.capabilities import Fitted, MaybeIntegers, MayOnlyRead, claims
from polyquant.codecs.affine_forms import unchanged
from polyquant.codecs.keeping import verdicts_kept
from polyquant.codecs.ternary import refuse_several, ternarize, used_scales
from polyquant.conversion.notices import mixed_stacks, rule_notices, substitutes
from polyquant.conversion.order import model_order
from polyquant.conversion.steps import Plan
from polyquant.errors import CodecError, InputError, PlanError, UnknownNameError
from polyquant.formats.actions import action_of, common
from polyquant.formats.protocol import Choice, OnTensor, Planning, Target
from polyquant.formats.steps import Step, importance_shapes
from polyquant.no_collection import no_collection
from polyquant.recipes.reading import load_recipe, uniform
from polyquant.recipes.recipe import Facts, Recipe, Rule
from polyquant.registry import codec
from polyquant.rows import one_matrix
from polyquant.storage.locations import is_remote
from polyquant.types import (
    F32,
    Action,
    Blocks,
    Checkpoint,
    Codec,
    TensorMap,
    TensorSpec,
    Ternary,
    Translation,
    Weight,
    as_matrix,
)

__all__ = ["make_plan"]

_WEIGHTS_AT_ONCE = 1 << 20


@verdicts_kept()
def make_plan(
    source: Checkpoint,
    carry: Callable[[Checkpoint], Translation],
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
    measured: Mapping[str, Any] | None = None,
) -> Plan:
    """Make the plan. carry: the source's names, metadata and files as they are (Format.carry). options: those of
    `target`, which writes the format `to`.

    codec: one for all matrices; recipe: a mix by name or file; neither: keep the source's codecs. on_tensor: called
    with (done, total, name) of the tensors whose sensitivity is measured. Raises PlanError for lossy steps without
    `requantize` and for models that are not fully known without `allow_unknown`; UnknownNameError, InputError.
    """
    if codec and recipe:
        raise PlanError("--codec and --recipe are mutually exclusive", hint="omit one of them")
    base = uniform(codec) if codec else load_recipe(recipe) if recipe else Recipe("as the source")
    chosen = target.recipe(base, rules, options, named=bool(codec or recipe))
    target.refuse(options, importance)
    translation = _translate(source, carry, target, chosen, options)
    if translation.unknown and not allow_unknown:
        raise PlanError(translation.unknown[0], file=source.path, hint="pass --allow-unknown to write it anyway")
    options = target.for_model(source, translation, options)
    planning = Planning(
        source, target, translation, chosen, _facts(source, translation, importance), options,
        lambda tensor, choose: _step(source, tensor, choose),
        tuple(_constant(name, values) for name, values in translation.constants.items()),
        requantize, on_tensor, dict(measured or {}),
    )  # fmt: skip
    planning, steps = target.prepare(planning)
    warnings = (*source.notes, *translation.unknown, *translation.warnings, *_mismatches(steps, importance))
    warnings += (*substitutes(steps), *mixed_stacks(steps), *rule_notices(rules, planning.facts, steps))
    with no_collection():
        layout = target.lay_out(planning, steps)
    return Plan(
        source, to, target, planning.options, planning.recipe, translation, tuple(steps), layout,
        (*warnings, *target.warnings(planning, steps)), importance or {}, target.method(planning, steps),
        target.text(steps, planning.options), measured=planning.measured,
    )  # fmt: skip


@no_collection()
def _translate(
    source: Checkpoint, carry: Callable[[Checkpoint], Translation], target: Target, recipe: Recipe, options: Any
) -> Translation:
    """Names, metadata and files: unchanged if source and target share a naming scheme, else translated.

    Tensors are sorted into the model's order, except from GGUF to GGUF, which keeps the order of the source.
    """
    translation = carry(source) if source.naming == target.naming else target.translate(source, recipe, options)
    return (
        translation
        if source.naming == target.naming == "gguf"
        else replace(translation, tensors=model_order(translation.tensors))
    )


def _facts(source: Checkpoint, translation: Translation, importance: Mapping[str, F32] | None) -> Facts:
    """Facts for the rules, from the target's metadata."""

    def number(key: str) -> int:
        entry = translation.metadata.get(f"{translation.architecture}.{key}")
        return int(entry.value) if entry is not None and isinstance(entry.value, int) else 0

    heads, kv = number("attention.head_count"), number("attention.head_count_kv")
    names = {t.target for t in translation.tensors}
    return Facts(
        layers=number("block_count"),
        gqa=heads // kv if heads and kv else 1,
        tied="output.weight" not in names,
        importance=bool(importance),
    )


def _step(source: Checkpoint, tensor: TensorMap, choose: Callable[[], Choice]) -> Step:
    """Plan one tensor. Raises PlanError for a codec that cannot hold it."""
    weights = [source[name] for name in tensor.sources]
    _refuse_shapes(source, weights, tensor)
    try:
        target, why, instead_of = choose()
        if claims(target, Fitted):  # type: ignore[type-abstract]
            target.fit(tensor.shape)  # fix its options now, not when the step runs
        nbytes = sum(s.nbytes for s in target.specs(tensor.shape).values())
        action = action_of(weights, target, tensor)
        _refuse_unwritable(weights, target, action)
        if action in (Action.COPY, Action.TRANSCODE):
            _refuse_several_scales(weights, target, whole=not is_remote(source.path))
        if action in (Action.QUANTIZE, Action.REQUANTIZE) and not tensor.ternarize:
            _refuse_other_than_ternary(weights[0], target)
    except CodecError as problem:
        raise PlanError(
            str(problem),
            file=source.path,
            tensor=tensor.origin,
            hint=None if problem.hint else f"choose another codec: --rule '{tensor.target}=f16'",
        ) from None
    specs = tuple(TensorSpec(w.name, w.shape, w.codec) for w in weights)
    kept = action in (Action.COPY, Action.TRANSCODE)
    exact = kept and all(unchanged(w, target) for w in one_matrix(weights, tensor.op)[0])
    return Step(tensor, common(weights), target, action, why, nbytes, sources=specs, instead_of=instead_of, exact=exact)


def _refuse_unwritable(weights: Sequence[Weight], target: Codec, action: Action) -> None:
    """Raise CodecError for a codec that these weights cannot be written in."""
    searched = action in (Action.QUANTIZE, Action.REQUANTIZE)
    if searched and not _writable(target):
        like = _writable_like(target)
        raise CodecError(f"{target} can be read, not written", hint=f"choose another codec{like and f', e.g. {like}'}")
    if _is_integer(target) and action is not Action.COPY and not all(_is_integer(w.codec) for w in weights):
        raise CodecError(f"{target} holds integers, and the weights are floats", hint="choose a float codec, e.g. bf16")


def _writable(target: Codec) -> bool:
    return not claims(target, MayOnlyRead) or target.writable  # type: ignore[type-abstract]


def _writable_like(target: Codec) -> str:
    """A codec of the same family that can be written; empty if there is none."""
    name = target.name
    while "." in name:
        name = name.rpartition(".")[0]
        with suppress(UnknownNameError):
            if _writable(codec(name)):
                return name
    return "q4_k" if target.form is Blocks else ""


def _refuse_other_than_ternary(weight: Weight, target: Codec) -> None:
    """Raise CodecError if a codec with one scale per tensor gets non-ternary weights, judged by the first row."""
    strict = target.form is Ternary and not target.row_sliced and not getattr(target, "lossy", False)
    if strict and len(weight.shape) > 1 and weight.codec.row_sliced:
        ternarize(target.name, weight.dequantize(rows=slice(0, 1)), lossy=False)


def _refuse_several_scales(weights: Sequence[Weight], target: Codec, *, whole: bool) -> None:
    """Raise CodecError if a ternary codec with one scale per tensor gets several.

    whole: read all rows, because scales are stored between the codes; otherwise the first and the last one.
    """
    if target.form is not Ternary or target.row_sliced or (len(weights) == 1 and not weights[0].codec.row_sliced):
        return
    found = np.empty(0, np.float32)
    for weight in weights:
        for codes in _ternary_blocks(weight, whole=whole):
            found = np.union1d(found, used_scales(codes))
            refuse_several(target.name, found)


def _ternary_blocks(weight: Weight, *, whole: bool) -> Iterator[Ternary]:
    """Yield the codes of a ternary weight by row blocks, its ends first."""
    rows, k = as_matrix(weight.shape)
    if not rows:
        return
    if not weight.codec.row_sliced:
        if whole:
            yield weight.codec.unpack(weight.read(), (rows, k))
        return
    step = max(1, _WEIGHTS_AT_ONCE // max(1, k))
    inside = (slice(a, min(rows - 1, a + step)) for a in range(1, rows - 1, step)) if whole else ()
    for block in (slice(0, 1), slice(rows - 1, rows), *inside):
        yield weight.codec.unpack(weight.read(block), (block.stop - block.start, k))


def _is_integer(codec: Codec) -> bool:
    return claims(codec, MaybeIntegers) and codec.is_integer  # type: ignore[type-abstract]


def _refuse_shapes(source: Checkpoint, weights: Sequence[Weight], tensor: TensorMap) -> None:
    """Raise InputError if the sources do not give the shape of the translation."""
    shape = tensor.op.shape([w.shape for w in weights], tensor.target)
    if shape != tensor.shape:
        raise InputError(
            "its sources give a different shape",
            file=source.path,
            tensor=tensor.target,
            expected=list(tensor.shape),
            found=list(shape),
        )


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
    """Warnings about an importance file that does not belong to this model.

    Raises PlanError for a wrong row length or number of experts.
    """
    if not importance:
        return ()
    for s in steps:
        values = importance.get(s.map.target)
        if values is not None and values.shape not in importance_shapes(s.map.shape):
            raise PlanError(
                "importance does not match the length of the tensor's rows",
                tensor=s.map.target,
                expected=" or ".join(str(list(x)) for x in importance_shapes(s.map.shape)),
                found=list(values.shape),
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
            f"{len(mixed)} stacks use the mean importance of their experts: their codec mixes the rows of all experts "
            f"(first: {mixed[0]})"
        )
    if unreached_experts := {s.map.target: none for s in steps if (none := unreached(importance.get(s.map.target)))}:
        first, experts = next(iter(unreached_experts.items()))
        out.append(f"{unreached_notice(unreached_experts)} (first: {_listed(experts)} of {first})")
    if extra := [n for n in importance if n not in named]:
        out.append(f"importance names {len(extra)} tensors that the model lacks, e.g. {extra[0]}")
    if missing:
        out.append(f"{len(missing)} quantized tensors have no importance, e.g. {missing[0]}")
    return tuple(out)


def _listed(experts: Sequence[int], most: int = 8) -> str:
    """A list of expert numbers: "expert 3", "experts 3, 7, 11 and 4 more"."""
    more = f" and {len(experts) - most} more" if len(experts) > most else ""
    return f"expert{'s' * (len(experts) > 1)} {', '.join(map(str, experts[:most]))}{more}"
