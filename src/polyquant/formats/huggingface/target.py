"""Write a Hugging Face folder: floats, packed BitNet, EXL3, existing MXFP4 codes, and the schemes of schemes.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from polyquant.architectures import translate
from polyquant.calibration.samples import check_text
from polyquant.codecs import affine_forms
from polyquant.codecs.hf_mxfp4 import HF_MXFP4
from polyquant.codecs.trellis_forms import as_exl3
from polyquant.errors import CodecError, PlanError, UnusedCalibrationError
from polyquant.formats.actions import blocks_of, common, same_codes, survives
from polyquant.formats.huggingface.layout import lay_out, one_file
from polyquant.formats.huggingface.mxfp4 import BLOCKS, as_stored
from polyquant.formats.huggingface.options import HuggingFaceOptions
from polyquant.formats.huggingface.scheme_names import DEFAULTS
from polyquant.formats.huggingface.schemes import Arranges, Scheme, TakesApart, scheme_named, scheme_of
from polyquant.formats.huggingface.work import SchemeWorker, calibrated, fitted, measured
from polyquant.formats.linears import is_linear
from polyquant.formats.plain_target import TORCH_NAMES, PlainTarget
from polyquant.formats.protocol import Choice, Context, Planning, Worker
from polyquant.formats.smoothing import marked
from polyquant.formats.steps import Step
from polyquant.recipes.recipe import Facts, Recipe
from polyquant.registry import codec
from polyquant.storage import strict_json
from polyquant.types import F32, Checkpoint, Codec, Floats, Layout, TensorMap, Translation, TrellisCodes, Weight

__all__ = ["HuggingFaceTarget"]


class HuggingFaceTarget(PlainTarget):
    """The target: safetensors shards, config.json and the small files."""

    options = HuggingFaceOptions

    def translate(self, source: Checkpoint, recipe: Recipe, options: Any) -> Translation:
        """Translate from GGUF to Hugging Face's names; without a recipe, codes of another tool may be kept."""
        return translate.to_hf(source, dtype=TORCH_NAMES.get(recipe.base or ""), packed=recipe.base is None)

    def prepare(self, planning: Planning) -> tuple[Planning, list[Step]]:
        """Plan the steps; MXFP4 weights without a recipe are kept."""

        def kept(tensor: TensorMap) -> TensorMap:
            name, _ = planning.recipe.choose((tensor.target, *tensor.sources), planning.facts)
            return as_stored(tensor, planning.source) if name is None else tensor

        tensors = tuple(kept(t) for t in planning.translation.tensors)
        scheme, files = _scheme(planning.recipe, planning.options), planning.translation.files
        if isinstance(scheme, Arranges | TakesApart) and "config.json" in files:
            config = strict_json.typed(strict_json.parse(files["config.json"], file="config.json"), dict, "config.json")
            if isinstance(scheme, Arranges):
                tensors = scheme.arranged(tensors, config)
            else:
                tensors = self._apart(tensors, scheme.parts_of(tensors, config), planning)
        planning, steps = super().prepare(replace(planning, translation=replace(planning.translation, tensors=tensors)))
        if scheme is not None and all(s.target.form is Floats for s in steps):
            _refuse_floats(steps)
        _refuse_calibration(steps, planning.options.calibration)
        if planning.options.calibration is None:
            return planning, steps
        steps = marked(planning.source, steps, "awq") if planning.options.effort == "max" else steps
        return planning, [replace(s, cut=False) if calibrated(s) else s for s in steps]

    def _apart(
        self, tensors: Sequence[TensorMap], parts: Mapping[str, Sequence[TensorMap]], planning: Planning
    ) -> tuple[TensorMap, ...]:
        """The tensors, with the parts of those that are quantized, and of the others of the same module."""

        def quantized(tensor: TensorMap) -> bool:
            chosen = self.choose(planning.source, tensor, planning.recipe, planning.facts, planning.options)
            return chosen.codec.form is not Floats

        stems = {name: each[0].target.partition(".experts.")[0] for name, each in parts.items()}
        apart = {stems[name] for name, each in parts.items() if any(map(quantized, each))}
        return tuple(part for t in tensors for part in (parts[t.target] if stems.get(t.target) in apart else (t,)))

    def refuse(self, options: Any, importance: Mapping[str, F32] | None) -> None:
        """Raise PlanError or InputError for an unusable calibration text."""
        if options.calibration is not None and importance:
            raise PlanError("--calibration and --importance are mutually exclusive", hint="omit one of them")
        if options.effort not in (None, "default", "max"):
            raise PlanError("unknown effort for a Hugging Face folder", expected="default or max", found=options.effort)
        if options.effort == "max" and options.calibration is None:
            raise PlanError("--effort max needs calibration", hint="add --calibration FILE")
        check_text(options.calibration)

    def text(self, steps: Sequence[Step], options: Any) -> str | None:
        """The calibration text, if a step uses it."""
        text: str | None = options.calibration
        return text if any(calibrated(s) for s in steps) else None

    def warnings(self, planning: Planning, steps: Sequence[Step]) -> tuple[str, ...]:
        """A warning about stacks of experts that a scheme leaves float."""
        if _scheme(planning.recipe, planning.options) is None:
            return ()
        stacks = [s.map for s in steps if len(s.map.shape) == 3 and 1 not in s.map.shape and s.target.form is Floats]
        return (f"{len(stacks)} stacks of experts stay float (first: {stacks[0].target})",) if stacks else ()

    def worker(self, context: Context) -> Worker | None:
        """A worker that searches codes on the calibration text."""
        text = self.text(context.steps, context.options)
        return None if text is None else SchemeWorker(context, text)

    def method(self, planning: Planning, steps: Sequence[Step]) -> str | None:
        """The search for codes."""
        if self.text(steps, planning.options) is None:
            return None
        if not any(fitted(s) for s in steps):
            return "measured inputs"
        return "AWQ scaling and GPTQ" if planning.options.effort == "max" else "GPTQ"

    def choose(self, source: Checkpoint, tensor: TensorMap, recipe: Recipe, facts: Facts, options: Any) -> Choice:
        """Choose a codec. Raises PlanError for a rule that decodes a single MXFP4 tensor."""
        if (scheme := _scheme(recipe, options)) is not None:
            return self._in_scheme(scheme, source, tensor, recipe, facts)
        chosen = super().choose(source, tensor, recipe, facts, options)
        if _packed(common([source[n] for n in tensor.sources]), tensor) and chosen.codec is not HF_MXFP4:
            raise PlanError(
                f"MXFP4 experts cannot become {chosen.codec} individually",
                tensor=tensor.target,
                hint="choose a codec for all matrices, e.g. --codec bf16",
            )
        return chosen

    def _in_scheme(self, scheme: Scheme, source: Checkpoint, tensor: TensorMap, recipe: Recipe, facts: Facts) -> Choice:
        """A codec of the scheme for the tensors that it quantizes, floats for all others.

        Without a recipe the codes of a quantized source are kept. Raises PlanError for a float source without one.
        """
        weights, names = [source[n] for n in tensor.sources], (tensor.target, *tensor.sources)
        have = common(weights)
        rule = next((r for r in recipe.rules if r.applies(names, facts)), None)
        if self.unquantized(have):
            return Choice(have, "not a float: kept")
        if rule is None and not scheme.quantizes(tensor.target, tensor.shape):
            return self._unquantized(source, have, tensor)
        name, why = recipe.choose(names, facts)
        if name is None:
            return self._held(scheme, source, weights, tensor)
        wanted = codec(name)
        if scheme.holds(wanted):
            try:
                wanted.specs(tensor.shape)
            except CodecError as problem:
                floats = self._unquantized(source, have, tensor)
                return floats._replace(why=f"{problem.message}: stays float", instead_of=name)
        return Choice(wanted, why)

    def _held(self, scheme: Scheme, source: Checkpoint, weights: Sequence[Weight], tensor: TensorMap) -> Choice:
        """The scheme's codec for the codes of quantized weights. Raises PlanError for floats."""
        have = common(weights)
        if have.form is Floats and any(w.codec.form is not Floats and len(w.shape) > 1 for w in source.values()):
            return Choice(have, "a float in the quantized source: kept")
        if have.form is Floats:
            raise PlanError(
                f"the source's weights are floats, and {scheme.title} are quantized",
                file=source.path,
                tensor=tensor.origin,
                hint=f"quantize them: --codec {DEFAULTS[scheme.name]}",
            )
        held = scheme.holding(have, tensor.shape)
        if held is not None and survives(weights, tensor) and all(same_codes(w, held, tensor) for w in weights):
            return Choice(held, "codes kept")
        if len(tensor.shape) == 2 and not is_linear(tensor.target, tensor.shape):  # embeddings and output heads
            return self._unquantized(source, have, tensor)
        wanted, why = codec(DEFAULTS[scheme.name]), f"{scheme.title} cannot hold the codes of {have}"
        try:
            wanted.specs(tensor.shape)
        except CodecError:
            hint = "choose another scheme, or requantize: --codec with groups that divide it, and --requantize"
            raise PlanError(why, file=source.path, tensor=tensor.target, hint=hint) from None
        return Choice(wanted, why)

    def _unquantized(self, source: Checkpoint, have: Codec, tensor: TensorMap) -> Choice:
        """Floats: those of the source, or decoded ones of the model's dtype."""
        if have.form is Floats:
            return Choice(have, "kept")
        if tensor.is_vector:
            return Choice(self.vector(have), "vector")
        return Choice(codec(affine_forms.floats_of(source.config)), "decoded to floats")

    def kept(self, have: Codec, tensor: TensorMap) -> Choice:
        """The source's codec; trellis codes are kept if EXL3 can store them."""
        if have.form is TrellisCodes and (exl3 := as_exl3(have, tensor.shape)) is not None:
            return Choice(exl3, "codes kept")
        if _packed(have, tensor):
            return Choice(HF_MXFP4, "codes kept")
        return super().kept(have, tensor)

    def lay_out(self, planning: Planning, steps: Sequence[Step]) -> Layout:
        """Lay out shards, index and files. Raises PlanError."""
        specs, files = [s.spec for s in steps], planning.translation.files
        size = planning.options.shard_bytes
        if planning.options.single_file:
            if size is not None:
                raise PlanError("single_file and shard_bytes are mutually exclusive")
            entries = {key: str(meta.value) for key, meta in planning.translation.metadata.items()}
            return one_file(specs, entries)
        scheme = _scheme(planning.recipe, planning.options)
        sizes = {} if size is None else {"shard_bytes": size}
        return lay_out(
            specs, files, scheme=None if scheme is None else scheme.name, before=planning.source.config, **sizes
        )


def _scheme(recipe: Recipe, options: Any) -> Scheme | None:
    """The scheme that is requested, by name or by the codec for all matrices."""
    if options.scheme is not None:
        return scheme_named(options.scheme)
    return None if recipe.base is None else scheme_of(codec(recipe.base))


def _refuse_floats(steps: Sequence[Step]) -> None:
    """Raise PlanError if the codec of a scheme fits no weight, with the reason of the first one."""
    step = next((s for s in steps if s.instead_of), None)
    if step is not None:
        raise PlanError(
            step.why.removesuffix(": stays float"),
            tensor=step.map.target,
            expected=f"a group that divides {step.map.shape[-1]}",
            found=step.instead_of,
            hint="choose another group size",
        )


def _refuse_calibration(steps: Sequence[Step], text: str | None) -> None:
    """Raise PlanError for a calibration text that is missing, UnusedCalibrationError for one that no step uses."""
    static = next((s for s in steps if measured(s)), None)
    if text is None and static is not None:
        raise PlanError(
            f"{static.target} has a scale of the inputs, which is measured on a text",
            tensor=static.map.target,
            hint="add --calibration FILE, or choose a codec without .static",
        )
    if text is not None and not any(calibrated(s) for s in steps):
        raise UnusedCalibrationError(
            "--calibration has no effect: no weight is quantized to codes that it could improve",
            hint="omit --calibration",
        )


def _packed(have: Codec, tensor: TensorMap) -> bool:
    """True for a tensor that is stored as MXFP4 under a matching name."""
    return tensor.target.endswith(BLOCKS) and blocks_of(have) == HF_MXFP4.holds
