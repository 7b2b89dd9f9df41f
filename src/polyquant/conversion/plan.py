"""What will be done, decided before any work: each tensor's codec, action and exact bytes, and where every byte will lie.

    detect -> open -> translate (names, row order, metadata) -> recipe (codecs) -> lay out (headers, offsets)

Everything that can be refused is refused here: unreadable input, codecs that do not fit, lossy steps nobody asked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from polyquant.architectures import translate
from polyquant.calibration.stages import OWN_TEXT
from polyquant.codecs.affine_forms import only_read
from polyquant.codecs.msmodelslim import MsModelSlim
from polyquant.codecs.tl import TL, Tile
from polyquant.conversion.choose import action_of, choose, common
from polyquant.conversion.steps import DEFAULT_NAME, MSMODELSLIM, TRELLIS, Plan
from polyquant.errors import CodecError, InputError, PlanError
from polyquant.formats.gguf import Metadata
from polyquant.formats.msmodelslim import settle as ascend_settle
from polyquant.formats.msmodelslim import target as ascend_target
from polyquant.formats.msmodelslim.keep import with_proposal
from polyquant.formats.msmodelslim.options import AUTO, MsModelSlimOptions
from polyquant.formats.steps import Step, importance_shapes
from polyquant.formats.trellis import target as trellis_target
from polyquant.formats.trellis.allocation import with_allocation
from polyquant.formats.trellis.target import TrellisOptions
from polyquant.recipes.recipe import Facts, Recipe, Rule, load_recipe, uniform
from polyquant.registry import codec, format_module
from polyquant.runtime.text import read_text
from polyquant.types import (
    F32,
    Action,
    Checkpoint,
    Kind,
    Layout,
    Meta,
    TensorMap,
    TensorSpec,
    Translation,
    Weight,
)

__all__ = ["make_plan"]

TORCH_NAMES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
"""What config.json calls the type of the matrices."""

NO_OPTIONS = TrellisOptions()
NO_ASCEND = MsModelSlimOptions()


def make_plan(
    source: Checkpoint,
    to: str,
    *,
    codec: str | None = None,
    recipe: str | None = None,
    rules: Sequence[Rule] = (),
    requantize: bool = False,
    importance: Mapping[str, F32] | None = None,
    architecture: str | None = None,
    tile: Tile | None = None,
    shard_bytes: int | None = None,
    trellis: TrellisOptions = NO_OPTIONS,
    ascend: MsModelSlimOptions = NO_ASCEND,
    on_tensor: Callable[[int, int, str], None] | None = None,
) -> Plan:
    """Decide everything. codec: one for all matrices; recipe: a mix by name or file; neither: keep the source's codecs. trellis: of a Trellis target.
    ascend: of an msModelSlim target. on_tensor: told (done, all, name) of the tensors whose sensitivity is measured, for trellis.target_bpw.

    Raises PlanError for lossy steps without `requantize`, UnknownNameError, InputError.
    """
    chosen = _recipe(to, codec, recipe, rules, trellis, ascend)
    _refuse_inputs(to, importance, trellis, ascend)
    translation = _translate(source, to, architecture, chosen)
    if to == MSMODELSLIM:
        ascend = ascend_target.for_model(source, ascend, translation)
    facts = _facts(source, translation, importance)
    steps = _steps(source, translation, to, chosen, facts, tile, ascend)
    if to == MSMODELSLIM and AUTO in ascend.keep:
        ascend, how = with_proposal(source, steps, ascend, on_tensor)
        chosen = replace(chosen, name=f"{chosen.name}, {how}")
        steps = _steps(source, translation, to, chosen, facts, tile, ascend)
    _refuse_lossy(steps, source, requantize=requantize)
    for step in steps if trellis.calibrated else ():
        if step.searches:
            step.inputs  # noqa: B018  refuses what no calibration reaches
    if to == MSMODELSLIM:
        steps = ascend_settle.settled(source, steps, ascend)
    warnings = (*source.notes, *translation.warnings, *_mismatches(steps, importance))
    if trellis.target_bpw is not None:
        steps, how = with_allocation(source, steps, trellis, on_tensor)
        chosen = replace(chosen, name=how)
    layout, method, more = _layout(source, to, chosen, translation, steps, shard_bytes, trellis, ascend)
    return Plan(
        source, to, chosen, translation, tuple(steps), layout, (*warnings, *more), importance or {}, method,
        trellis.calibration if trellis.calibrated and any(s.searches for s in steps) else None, ascend if to == MSMODELSLIM else None,
    )  # fmt: skip


def _layout(
    source: Checkpoint,
    to: str,
    recipe: Recipe,
    translation: Translation,
    steps: Sequence[Step],
    shard_bytes: int | None,
    trellis: TrellisOptions,
    ascend: MsModelSlimOptions,
) -> tuple[Layout, str | None, tuple[str, ...]]:
    """Where every byte will lie; how trellis codes are searched; what a reader of the target should be warned of."""
    specs = [TensorSpec(s.map.target, s.map.shape, s.target) for s in steps]
    module, files = format_module(to), translation.files
    if to == "gguf":
        metadata = _with_file_type(translation.metadata, recipe, steps)
        return module.lay_out(specs, metadata, name=DEFAULT_NAME, split_bytes=shard_bytes), None, ()
    options: dict[str, Any] = {} if shard_bytes is None else {"shard_bytes": shard_bytes}
    if to == TRELLIS:
        options |= trellis_target.layout_options(source, steps, trellis)
        return module.lay_out(specs, files, **options), options["method"], trellis_target.warnings(source, files, steps)
    if to == MSMODELSLIM:
        options |= ascend_target.layout_options(source, ascend)
        return module.lay_out(specs, files, **options), None, ascend_settle.warnings(source, files, steps)
    return module.lay_out(specs, files, **options), None, ()


def _refuse_inputs(
    to: str, importance: Mapping[str, F32] | None, trellis: TrellisOptions, ascend: MsModelSlimOptions
) -> None:
    """Raises PlanError and InputError for what would be refused when the work gets there."""
    if trellis.calibrated and importance:
        raise PlanError("an importance matrix is the diagonal of what calibration finds", hint="leave out --importance")
    if to == MSMODELSLIM and importance:
        raise PlanError("no msModelSlim codec weighs its columns", hint="--calibration FILE --effort max does more")
    for text in (trellis.calibration, ascend.calibration):
        if text is not None and text != OWN_TEXT:
            read_text(text)


def _recipe(
    to: str,
    codec: str | None,
    recipe: str | None,
    rules: Sequence[Rule],
    trellis: TrellisOptions,
    ascend: MsModelSlimOptions,
) -> Recipe:
    """What the target codecs are chosen by. Raises PlanError for options that do not go together."""
    if codec and recipe:
        raise PlanError("give a codec or a recipe, not both")
    chosen = uniform(codec) if codec else load_recipe(recipe) if recipe else Recipe("as the source")
    if to == TRELLIS:
        return trellis_target.recipe_of(chosen, trellis, rules, named=bool(codec or recipe))
    if trellis.given:
        raise PlanError(f"{trellis.given} is for Trellis folders", hint=f"add --to {TRELLIS}")
    if to == MSMODELSLIM:
        chosen = ascend_target.recipe_of(chosen, ascend)
    return chosen.with_rules(rules)


def _translate(source: Checkpoint, to: str, architecture: str | None, recipe: Recipe) -> Translation:
    if (source.format == "gguf") == (to == "gguf"):
        if architecture:
            raise PlanError("an architecture can be chosen only when Hugging Face becomes GGUF")
        return _same_format(source)
    if to == "gguf":
        return translate.to_gguf(source, architecture=architecture)
    return translate.to_hf(source, dtype=TORCH_NAMES.get(recipe.base or ""))


def _same_format(source: Checkpoint) -> Translation:
    """Names, metadata and small files as they are: from GGUF to GGUF, from one kind of folder to another."""
    tensors = tuple(TensorMap(w.name, (w.name,), w.shape, keep_float=len(w.shape) < 2) for w in source.values())
    if source.format == "gguf":
        typed = dict(cast(Metadata, source.metadata).items_typed())
        architecture = typed.get("general.architecture")
        return Translation(str(architecture.value) if architecture else "", tensors, metadata=typed)
    folder = source.path if source.path.is_dir() else source.path.parent
    paths = {**source.files, **({"config.json": folder / "config.json"} if source.config else {})}
    files = {n: p.read_bytes() for n, p in paths.items()}
    if "config.json" in files and source.format == "hf" and any(only_read(w.codec) for w in source.values()):
        files["config.json"] = translate.float_config(files["config.json"])  # no folder is written with such weights
    return Translation(str(source.config.get("model_type", "")), tensors, files=files)


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


def _steps(
    source: Checkpoint,
    translation: Translation,
    to: str,
    recipe: Recipe,
    facts: Facts,
    tile: Tile | None,
    ascend: MsModelSlimOptions,
) -> list[Step]:
    return [
        *(_step(source, tensor, to, recipe, facts, tile, ascend) for tensor in translation.tensors),
        *(_constant(target, values) for target, values in translation.constants.items()),
    ]


def _step(
    source: Checkpoint,
    tensor: TensorMap,
    to: str,
    recipe: Recipe,
    facts: Facts,
    tile: Tile | None,
    ascend: MsModelSlimOptions,
) -> Step:
    weights = [source[name] for name in tensor.sources]
    _refuse_shapes(source, weights, tensor)
    target, why = choose(source, tensor, to, recipe, facts, ascend)
    if tile is not None and isinstance(target, TL):
        target = target.configure(tile=tile)
    try:
        if isinstance(target, TL):
            target.fit(tensor.shape)  # its tile must be known now, not when the work gets there
        nbytes = sum(s.nbytes for s in target.specs(tensor.shape).values())
    except CodecError as problem:
        raise PlanError(
            str(problem),
            file=source.path,
            tensor=tensor.origin,
            hint=None if problem.hint else f"give it another codec: --rule '{tensor.target}=f16'",
        ) from None
    specs = tuple(TensorSpec(w.name, w.shape, w.codec) for w in weights)
    return Step(tensor, common(weights), target, action_of(weights, target, tensor), why, nbytes, sources=specs)


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


def _refuse_lossy(steps: Sequence[Step], source: Checkpoint, *, requantize: bool) -> None:
    lossy = [s for s in steps if s.action is Action.REQUANTIZE]
    if lossy and not requantize:
        first = lossy[0]
        raise PlanError(
            f"{len(lossy)} tensors are quantized already; quantizing them again loses more",
            file=source.path,
            tensor=first.map.origin,
            expected="float source",
            found=f"{first.source} -> {first.target}",
            hint="convert without a codec keeps the codes; else start from the float model, or pass --requantize"
            if isinstance(first.target, MsModelSlim)
            else "start from the float model, or pass --requantize",
        )


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
    if strangers := [n for n in importance if n not in named]:
        out.append(f"importance names {len(strangers)} tensors that the model lacks, e.g. {strangers[0]}")
    if missing:
        out.append(f"{len(missing)} quantized tensors have no importance, e.g. {missing[0]}")
    return tuple(out)
