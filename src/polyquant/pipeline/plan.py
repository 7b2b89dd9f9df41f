"""What will be done, decided before any work: each tensor's codec, action and exact bytes, and where every byte will lie.

    detect -> open -> translate (names, row order, metadata) -> recipe (codecs) -> lay out (headers, offsets)

Everything that can be refused is refused here: unreadable input, codecs that do not fit, lossy steps nobody asked for.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from polyquant.codecs.tl import TL, Tile
from polyquant.codecs.trellis import Trellis
from polyquant.codecs.trellis_forms import floats_of, same_codes
from polyquant.errors import CodecError, PlanError
from polyquant.formats.gguf import Metadata
from polyquant.models import translate
from polyquant.pipeline import trellis_target
from polyquant.pipeline.allocation import with_allocation
from polyquant.pipeline.calibrate import OWN_TEXT, TOKENS, WINDOWS
from polyquant.pipeline.recipe import FALLBACK, Facts, Recipe, Rule, load_recipe, uniform
from polyquant.pipeline.trellis_target import TrellisOptions
from polyquant.registry import codec, format_module
from polyquant.runtime.evaluate import read_text
from polyquant.types import (
    F32,
    Action,
    Blocks,
    Checkpoint,
    Codec,
    Floats,
    Kind,
    Layout,
    Meta,
    TensorMap,
    TensorSpec,
    Ternary,
    Translation,
    TrellisCodes,
    as_matrix,
)

__all__ = ["TRELLIS", "Plan", "Step", "make_plan", "with_name"]

TORCH_NAMES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
"""What config.json calls the type of the matrices."""

TRELLIS = "trellis-v3"

NO_OPTIONS = TrellisOptions()

DEFAULT_NAME = "model.gguf"
"""Of a plan that does not know its target yet."""

TRELLIS_BYTES = 32
"""Working memory of a search for trellis codes or of their decoding, per weight of the one tensor that is in work."""

HESSIAN_BYTES = 44
"""Working memory for each of the K x K numbers of a Hessian: as collected for the inputs of a layer, rotated, and its factor in float64."""

BLOCK_WEIGHTS = 1 << 20
"""Weights per row block: large enough to make Python's share small, small enough to stay in cache."""


@dataclass(frozen=True, slots=True)
class Step:
    """One tensor. `source` is None for a constant that the translation brings."""

    map: TensorMap
    source: Codec | None
    target: Codec
    action: Action
    why: str
    nbytes: int

    @property
    def weights(self) -> int:
        """Number of weights."""
        return math.prod(self.map.shape)

    @property
    def streams(self) -> bool:
        """True if the step can go row block by row block."""
        return self.source is not None and self.source.row_sliced and self.target.row_sliced

    @property
    def searches(self) -> bool:
        """True if codes of a trellis are searched: hours of work where other steps take minutes."""
        return self.target.form is TrellisCodes and self.action in (Action.QUANTIZE, Action.REQUANTIZE)

    @property
    def alone(self) -> bool:
        """True if only one step of its kind may be in work: it holds a tensor as floats."""
        source = self.source
        return TrellisCodes in (self.target.form, source.form if source is not None else None)

    @property
    def block_rows(self) -> int:
        """Rows per block of a streaming step."""
        return max(1, BLOCK_WEIGHTS // max(1, as_matrix(self.map.shape)[1]))


@dataclass(frozen=True, slots=True)
class Plan:
    """A conversion, ready to run. method: how the codes of a Trellis target are searched; calibration: with the inputs that this text gives."""

    source: Checkpoint
    format: str
    recipe: Recipe
    translation: Translation
    steps: tuple[Step, ...]
    layout: Layout
    warnings: tuple[str, ...] = ()
    importance: Mapping[str, F32] = field(default_factory=dict)
    method: str | None = None
    calibration: str | None = None

    @property
    def nbytes(self) -> int:
        """Exact size of the output: every file, headers and padding counted."""
        return self.layout.nbytes

    @property
    def bpw(self) -> float:
        """Effective bits per weight of the output's tensors."""
        return 8 * sum(s.nbytes for s in self.steps) / max(1, sum(s.weights for s in self.steps))

    @property
    def quantized_bpw(self) -> float:
        """Effective bits per weight of the tensors that are not floats, every part counted; 0 if there are none."""
        quantized = [s for s in self.steps if s.target.form is not Floats]
        return 8 * sum(s.nbytes for s in quantized) / max(1, sum(s.weights for s in quantized))

    @property
    def peak_memory(self) -> int:
        """Upper estimate of working memory for two threads, in bytes, without interpreter and libraries."""

        def need(step: Step) -> int:
            rows, k = as_matrix(step.map.shape)
            if step.streams:
                return 2 * min(rows, step.block_rows) * k * 16
            if step.alone and step.action not in (Action.COPY, Action.TRANSCODE):
                return rows * k * TRELLIS_BYTES + (k * k * HESSIAN_BYTES if self.calibration is not None else 0)
            return rows * k * (3 if step.target.form is Ternary else 10)

        inputs = [as_matrix(s.map.shape)[1] for s in self.steps if s.searches and self.calibration is not None]
        return max((need(s) for s in self.steps), default=0) + 4 * WINDOWS * TOKENS * min(inputs, default=0)

    @property
    def actions(self) -> Counter[Action]:
        """How many tensors each action takes."""
        return Counter(s.action for s in self.steps)

    @property
    def fingerprint(self) -> str:
        """Names this very job: source files, steps and header bytes. A journal of another job is never resumed."""
        h = hashlib.sha256()
        root = self.source.path
        for path in _files(root) if root.is_dir() else [root]:
            stat = path.stat()
            h.update(f"{path.name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
        for s in self.steps:
            h.update(f"{s.map.source} {s.map.target} {s.map.shape} {s.action} {s.source} {s.target} ".encode())
            h.update(f"{s.target.tile if isinstance(s.target, TL) else None}\n".encode())
        for f in self.layout.files:
            h.update(f"{f.name} {f.size}\n".encode())
            for offset, data in f.pieces:
                h.update(f"{offset} ".encode() + data)
        for name, values in sorted(self.importance.items()):
            h.update(name.encode() + values.tobytes())
        if self.calibration is not None:
            h.update(self.calibration.encode())
            h.update(b"" if self.calibration == OWN_TEXT else read_text(self.calibration).encode())
        return h.hexdigest()


def _files(root: Path) -> list[Path]:
    """What lies in a folder and in the folders of its layers (Trellis v2)."""
    return [p for top in sorted(root.iterdir()) for p in ([top, *sorted(top.iterdir())] if top.is_dir() else [top])]


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
    on_tensor: Callable[[int, int, str], None] | None = None,
) -> Plan:
    """Decide everything. codec: one for all matrices; recipe: a mix by name or file; neither: keep the source's codecs. trellis: of a Trellis target.
    on_tensor: told (done, all, name) of the tensors whose sensitivity is measured, for trellis.target_bpw.

    Raises PlanError for lossy steps without `requantize`, UnknownNameError, InputError.
    """
    chosen = _recipe(to, codec, recipe, rules, trellis)
    if trellis.calibrated and importance:
        raise PlanError("an importance matrix is the diagonal of what calibration finds", hint="leave out --importance")
    if trellis.calibration is not None and trellis.calibration != OWN_TEXT:
        read_text(trellis.calibration)  # refused now, not when the work gets there
    translation = _translate(source, to, architecture, chosen)
    facts = _facts(source, translation, importance)
    steps = [
        *(_step(source, tensor, to, chosen, facts, tile) for tensor in translation.tensors),
        *(_constant(target, values) for target, values in translation.constants.items()),
    ]
    _refuse_lossy(steps, source, requantize=requantize)
    warnings = (*source.notes, *translation.warnings, *_mismatched_importance(steps, importance))
    if trellis.target_bpw is not None:
        steps, how = with_allocation(source, steps, trellis, on_tensor)
        chosen = replace(chosen, name=how)
    specs = [TensorSpec(s.map.target, s.map.shape, s.target) for s in steps]
    module = format_module(to)
    if to == "gguf":
        metadata = _with_file_type(translation.metadata, chosen, steps)
        layout = module.lay_out(specs, metadata, name=DEFAULT_NAME, split_bytes=shard_bytes)
    else:
        options: dict[str, Any] = {} if shard_bytes is None else {"shard_bytes": shard_bytes}
        if to == TRELLIS:
            options |= _trellis_options(source, steps, trellis)
        layout = module.lay_out(specs, translation.files, **options)
    if to == TRELLIS:
        carried = [s.map.source for s in steps if isinstance(s.target, Trellis) and not s.searches]
        stacks = [s.map.target for s in steps if len(s.map.shape) > 2 and s.target.form is Floats]
        warnings += trellis_target.warnings(source, translation.files, carried, stacks)
    return Plan(
        source, to, chosen, translation, tuple(steps), layout, warnings, importance or {}, options.get("method") if to == TRELLIS else None,
        trellis.calibration if trellis.calibrated and any(s.searches for s in steps) else None,
    )  # fmt: skip


def _recipe(to: str, codec: str | None, recipe: str | None, rules: Sequence[Rule], trellis: TrellisOptions) -> Recipe:
    """What the target codecs are chosen by. Raises PlanError for options that do not go together."""
    if codec and recipe:
        raise PlanError("give a codec or a recipe, not both")
    chosen = uniform(codec) if codec else load_recipe(recipe) if recipe else Recipe("as the source")
    if to == TRELLIS:
        return trellis_target.recipe_of(chosen, trellis, rules, named=bool(codec or recipe))
    if trellis.given:
        raise PlanError(f"{trellis.given} is for Trellis folders", hint=f"add --to {TRELLIS}")
    return chosen.with_rules(rules)


def _trellis_options(source: Checkpoint, steps: Sequence[Step], trellis: TrellisOptions) -> dict[str, Any]:
    """What laying out a Trellis folder needs to know besides the tensors."""
    origins = {
        s.map.target: trellis_target.origin(source, source[s.map.source], s.action)
        for s in steps
        if isinstance(s.target, Trellis)
    }
    actions = [s.action for s in steps if isinstance(s.target, Trellis)]
    method = trellis_target.method_of(source, actions, calibrated=trellis.calibrated)
    return {"origins": origins, "method": method, "target_bits": trellis.bits}


def _translate(source: Checkpoint, to: str, architecture: str | None, recipe: Recipe) -> Translation:
    if (source.format == "gguf") == (to == "gguf"):
        if architecture:
            raise PlanError("an architecture can be chosen only when Hugging Face becomes GGUF")
        return _same_format(source, to)
    if to == "gguf":
        return translate.to_gguf(source, architecture=architecture)
    return translate.to_hf(source, dtype=TORCH_NAMES.get(recipe.base or ""))


def _same_format(source: Checkpoint, to: str) -> Translation:
    """Names, metadata and small files as they are: from GGUF to GGUF, from one kind of folder to another."""
    tensors = tuple(TensorMap(w.name, w.name, w.shape, keep_float=len(w.shape) < 2) for w in source.values())
    if source.format == "gguf":
        typed = dict(cast(Metadata, source.metadata).items_typed())
        architecture = typed.get("general.architecture")
        return Translation(str(architecture.value) if architecture else "", tensors, metadata=typed)
    folder = source.path if source.path.is_dir() else source.path.parent
    paths = {**source.files, **({"config.json": folder / "config.json"} if source.config else {})}
    files = {n: p.read_bytes() for n, p in paths.items()}
    if to == "hf" and any(w.codec.form is TrellisCodes for w in source.values()):
        bare = {k: v for k, v in source.config.items() if k != "quantization_config"}
        files["config.json"] = (json.dumps(bare, indent=2, ensure_ascii=False) + "\n").encode()
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


def _step(source: Checkpoint, tensor: TensorMap, to: str, recipe: Recipe, facts: Facts, tile: Tile | None) -> Step:
    have = source[tensor.source].codec
    target, why = _choose(have, tensor, to, recipe, facts)
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
            tensor=tensor.source,
            hint=None if problem.hint else f"give it another codec: --rule '{tensor.target}=f16'",
        ) from None
    return Step(tensor, have, target, _action(have, target, tensor), why, nbytes)


def _constant(name: str, values: F32) -> Step:
    return Step(
        TensorMap("", name, values.shape, keep_float=True),
        None,
        codec("f32"),
        Action.COPY,
        "constant of the architecture",
        values.nbytes,
    )


def _choose(have: Codec, tensor: TensorMap, to: str, recipe: Recipe, facts: Facts) -> tuple[Codec, str]:
    """The target codec of one tensor and the reason that the plan prints."""
    names = (tensor.target, tensor.source)
    if (have.form is Floats and have.name.startswith(("i", "u", "bool"))) or have.name.startswith("ggml."):
        return have, "not a float: kept"
    if to == TRELLIS:
        return _choose_trellis(have, tensor, recipe, facts)
    if tensor.keep_float or len(tensor.shape) < 2:
        exact = next((r for r in recipe.rules if r.match in names), None)
        return (codec(exact.codec), f"rule {exact.match}") if exact else (_plain(have, to), "vector")
    name, why = recipe.choose(names, facts)
    if name is None:
        return _keep(have, tensor, to)
    return _fitting(name, tensor, why)


def _choose_trellis(have: Codec, tensor: TensorMap, recipe: Recipe, facts: Facts) -> tuple[Codec, str]:
    """Rules may name any matrix; the recipe's own codec is for linear layers; the rest stays what it is."""
    names, shape = (tensor.target, tensor.source), tensor.shape
    rule = next((r for r in recipe.rules if len(shape) == 2 and r.applies(names, facts)), None)
    if rule is not None:
        return codec(rule.codec), f"rule {rule.match}"
    if recipe.base is None or not trellis_target.is_linear(tensor.target, shape):
        return trellis_target.keep(have, shape)
    wanted = codec(recipe.base)
    return (wanted, "") if wanted.form is TrellisCodes else trellis_target.keep(have, shape)


def _is_vector(tensor: TensorMap) -> bool:
    return tensor.keep_float or len(tensor.shape) < 2


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


def _action(have: Codec, target: Codec, tensor: TensorMap) -> Action:
    if tensor.ternarize:
        return Action.QUANTIZE
    if have.name == target.name:
        return Action.COPY
    if have.form is target.form and have.form not in (Blocks, TrellisCodes):
        return Action.TRANSCODE
    if same_codes(have, target, tensor.shape):
        return Action.TRANSCODE
    if have.form is Floats:
        return Action.QUANTIZE
    return Action.DEQUANTIZE if target.form is Floats else Action.REQUANTIZE


def _refuse_lossy(steps: Sequence[Step], source: Checkpoint, *, requantize: bool) -> None:
    lossy = [s for s in steps if s.action is Action.REQUANTIZE]
    if lossy and not requantize:
        first = lossy[0]
        raise PlanError(
            f"{len(lossy)} tensors are quantized already; quantizing them again loses more",
            file=source.path,
            tensor=first.map.source,
            expected="float source",
            found=f"{first.source} -> {first.target}",
            hint="start from the float model, or pass --requantize",
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
            if not _is_vector(s.map):
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


def _mismatched_importance(steps: Sequence[Step], importance: Mapping[str, F32] | None) -> tuple[str, ...]:
    """Warnings about an importance file that does not belong to this model."""
    if not importance:
        return ()
    for s in steps:
        found = importance.get(s.map.target)
        if found is not None and found.shape != (as_matrix(s.map.shape)[1],):
            raise PlanError(
                "importance has another length than the tensor's rows",
                tensor=s.map.target,
                expected=s.map.shape[-1],
                found=found.shape,
            )
    named = {s.map.target for s in steps}
    missing = [
        s.map.target
        for s in steps
        if s.action is Action.QUANTIZE and not _is_vector(s.map) and s.map.target not in importance
    ]
    out = []
    if strangers := [n for n in importance if n not in named]:
        out.append(f"importance names {len(strangers)} tensors that the model lacks, e.g. {strangers[0]}")
    if missing:
        out.append(f"{len(missing)} quantized tensors have no importance, e.g. {missing[0]}")
    return tuple(out)


def with_name(plan: Plan, path: Path) -> Plan:
    """The same plan under the target's own name: a file, or the members of a split model NAME-00001-of-0000N.gguf."""
    if plan.layout.folder:
        return plan
    old, new = Path(DEFAULT_NAME).stem, path.name.removesuffix(".gguf")
    single = len(plan.layout.files) == 1
    names = {f.name: path.name if single else new + f.name.removeprefix(old) for f in plan.layout.files}
    slots = {key: replace(slot, file=names[slot.file]) for key, slot in plan.layout.slots.items()}
    files = tuple(replace(f, name=names[f.name]) for f in plan.layout.files)
    return replace(plan, layout=Layout(files, slots, False))
