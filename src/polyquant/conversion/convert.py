"""Convert a checkpoint to another format. Every step is planned, printed and measured."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from polyquant.architectures.language_model import language_model
from polyquant.calibration.importance import load_importance
from polyquant.conversion.execute import Engine, execute
from polyquant.conversion.plan import make_plan
from polyquant.conversion.report import Report
from polyquant.conversion.steps import Plan, with_name
from polyquant.conversion.tasks import Part, parse_part, shares
from polyquant.errors import PlanError, UnknownNameError, UnsupportedError
from polyquant.formats.existing import refuse_target
from polyquant.formats.progress import shows_progress
from polyquant.formats.protocol import DeclaresCodecs, Format, HasSchemes, OnTensor, Target
from polyquant.formats.steps import Progress
from polyquant.keywords import PLAN_DEFAULTS, FormatKeywords, PlanKeywords
from polyquant.no_collection import no_collection
from polyquant.opening import detect, open_sound
from polyquant.options import build, given, options_of, refuse_unknown, with_keywords
from polyquant.recipes.reading import parse_rule
from polyquant.recipes.recipe import Rule
from polyquant.registry import DEFAULT_TARGET, format_named, formats
from polyquant.registry import codec as codec_named
from polyquant.runtime.check import refuse_broken_model
from polyquant.storage.claims import held_bytes
from polyquant.storage.locations import RemotePath, located
from polyquant.storage.remote.spooled import spool_path
from polyquant.storage.remote.uploads import STREAMING
from polyquant.storage.work_folder import Resume
from polyquant.types import F32, Codec

__all__ = [
    "check_disk",
    "convert",
    "guess_format",
    "implied_format",
    "known_options",
    "plan",
    "quantize",
    "refuse_foreign",
    "smaller",
    "targets",
    "writable",
]


@with_keywords(FormatKeywords, PLAN_DEFAULTS)
@shows_progress("plan", steps=False, measurements=True)
def plan(
    src: str | os.PathLike[str],
    to: str,
    *,
    codec: str | None = None,
    recipe: str | None = None,
    rules: Sequence[Rule | str] = (),
    requantize: bool = False,
    allow_unknown: bool = False,
    importance: str | os.PathLike[str] | Mapping[str, F32] | None = None,
    progress: bool = False,
    on_tensor: OnTensor | None = None,
    measured: Mapping[str, Any] | None = None,
    **options: Unpack[FormatKeywords],
) -> Plan:
    """Open `src` and plan every step and byte of its conversion to `to` ("gguf", "hf", "trellis-v3", "msmodelslim",
    or a quantization scheme of Hugging Face folders: "compressed-tensors", "gptq", "awq").

    Nothing is written. codec: one codec for all matrices; recipe: a built-in mix ("q4_k_m") or a .toml file; rules:
    `PATTERN=CODEC`, which take precedence. requantize: allow requantizing quantized weights. allow_unknown: also write
    models of an unknown architecture, or with missing or extra tensors. importance: an imatrix GGUF file, or a mapping
    from target tensor name to float32 [K], for a stack of experts also [experts, K]. progress: draw a bar during long
    measurements; on_tensor: called with (done, total, name) during them; measured: `Plan.measured` of an equal plan,
    whose measurements are not repeated.

    The other keywords are options of the formats, which `polyquant convert --help` explains: options of the target
    (bits, effort, calibration, smooth, shard_bytes, ...), and properties of the source that its bytes do not show
    (ternary_layout, tile, repair, axes). None, False and empty values count as not given. Raises InputError, PlanError,
    UnknownNameError, CodecError; TypeError for an option that no format has.
    """
    refuse_unknown(options, known_options(), "plan")
    form, of_scheme = named_target(to)
    target = writable(form)
    refuse_foreign(options, form, target)
    source_form, _ = detect(src)
    of_source = options_of(source_form.open_options)
    open_options = {n: v for n, v in options.items() if n in of_source or n not in options_of(target.options)}
    with no_collection():
        source = open_sound(source_form, src, open_options)
        if not allow_unknown:
            refuse_broken_model(source, "pass --allow-unknown to write it anyway")
    if source_form.name != form.name:
        plain = source_form.plain(source)
        source_form = source_form if plain.format == source.format else format_named(plain.format)
        source = plain
    if source.naming != target.naming:
        source = language_model(source)
    weights = load_importance(importance) if isinstance(importance, str | os.PathLike) else importance
    parsed = [parse_rule(r) if isinstance(r, str) else r for r in rules]
    request = {
        "src": os.fspath(src), "to": to, "codec": codec, "recipe": recipe, "rules": tuple(parsed),
        "requantize": requantize, "allow_unknown": allow_unknown, "importance": importance, **options,
    }  # fmt: skip
    made = make_plan(
        source,
        source_form.carry,
        form.name,
        target,
        build(target.options, {**options, **of_scheme}),
        codec=codec,
        recipe=recipe,
        rules=parsed,
        requantize=requantize,
        allow_unknown=allow_unknown,
        importance=weights,
        on_tensor=on_tensor,
        measured=measured,
    )
    return replace(made, request={**request, "measured": made.measured})


def targets() -> list[tuple[Format, Target]]:
    """The writable formats, in the order in which they claim options."""
    return [(form, form.target) for form in formats() if form.target is not None]


def writable(form: Format) -> Target:
    """The format's target. Raises UnsupportedError for a format that is only read."""
    if form.target is None:
        names = ", ".join(f.name for f, _ in targets())
        raise UnsupportedError(f"{form.title} can be read, not written", expected=names, found=form.name)
    return form.target


def named_target(name: str) -> tuple[Format, dict[str, Any]]:
    """The format that `to` names, and its option `scheme` for the name of a scheme. Raises UnknownNameError."""
    for form in formats():
        if isinstance(form, HasSchemes) and name in form.schemes:
            return form, {"scheme": name}
    return format_named(name), {}


def known_options() -> set[str]:
    """Every option of every format."""
    of_targets = {name for _, target in targets() for name in options_of(target.options)}
    return of_targets | {name for form in formats() for name in options_of(form.open_options)}


def refuse_foreign(options: Mapping[str, Any], form: Format, target: Target) -> None:
    """Raise PlanError for an option of other targets, unless it may describe the source."""
    of_sources = {name for f in formats() for name in options_of(f.open_options)}
    for name in given(options):
        if name in options_of(target.options) or name in of_sources:
            continue
        having = [(f, options_of(t.options)[name]) for f, t in targets() if name in options_of(t.options)]
        titles = " and ".join(f.title for f, _ in having)
        hint = f"add --to {having[-1][0].name}"
        if name == "calibration":
            hint = "polyquant importance MODEL imatrix.gguf --calibration FILE, then --importance imatrix.gguf"
        raise PlanError(f"{having[0][1].flag or name} is for {titles}", hint=hint)


@with_keywords(PlanKeywords, PLAN_DEFAULTS)
@shows_progress("convert", measurements=True)
def convert(
    src: str | os.PathLike[str] | Plan,
    dst: str | os.PathLike[str],
    *,
    to: str | None = None,
    resume: Resume = "auto",
    overwrite: bool = False,
    threads: int | None = None,
    measure: bool = True,
    max_memory: int | str | None = None,
    part: str | Part | None = None,
    command: str = "",
    engine: Engine | None = None,
    progress: bool = False,
    on_progress: Callable[[Progress], None] | None = None,
    **options: Unpack[PlanKeywords],
) -> Report:
    """Convert `src` (a path or a Plan) to `dst`, which appears only when complete.

    to: target format, by default from `guess_format`. measure: measure the error of each tensor (always done for
    trellis codes). part: "3/8" writes the third of eight shares, and `merge` publishes all of them; command: how to
    make a part, for messages, with {part} for "3/8". engine: let workers of a cluster do the work. progress: draw a
    bar; on_progress: called after each row block. options: as for `plan`. Returns the report with the measured errors.
    Raises InputError, PlanError, UnknownNameError, OSError.
    """
    target = located(dst)
    if isinstance(src, Plan):
        plan_ = src
    else:
        refuse_target(target, located(src), overwrite=overwrite)
        plan_ = plan(src, to or guess_format(target, src, **options), **options)
    plan_ = with_name(plan_, target)
    share = parse_part(part) if isinstance(part, str) else part
    check_disk(plan_, target, share)
    return execute(
        plan_, target, resume=resume, overwrite=overwrite, threads=threads, measure=measure, max_memory=max_memory,
        part=share, command=command or f"polyquant.convert(..., {str(target)!r}, ..., part='{{part}}')", engine=engine,
        on_progress=on_progress,
    )  # fmt: skip


@with_keywords(PlanKeywords, PLAN_DEFAULTS)
@shows_progress("quantize", measurements=True)
def quantize(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    to: str | None = None,
    progress: bool = False,
    on_progress: Callable[[Progress], None] | None = None,
    resume: Resume = "auto",
    overwrite: bool = False,
    threads: int | None = None,
    measure: bool = True,
    max_memory: int | str | None = None,
    part: str | Part | None = None,
    command: str = "",
    engine: Engine | None = None,
    **options: Unpack[PlanKeywords],
) -> Report:
    """Like `convert`, with a default size: q4_k_m for GGUF, 4 bits for Trellis, w8a16 for msModelSlim."""
    to = to or guess_format(located(dst), src, **options)
    return convert(
        src, dst, to=to, resume=resume, overwrite=overwrite, threads=threads, measure=measure, max_memory=max_memory,
        part=part, command=command, engine=engine, on_progress=on_progress, **smaller(to, options),
    )  # fmt: skip


def smaller(to: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `quantize`, with the target's default if they select no codec, recipe or bits."""
    if any(options.get(key) is not None for key in ("codec", "recipe", "bits", "target_bpw")):
        return dict(options)
    form, of_scheme = named_target(to)
    if isinstance(form, HasSchemes) and of_scheme:
        return {**options, "codec": form.schemes[of_scheme["scheme"]]}
    return {**options, **writable(form).smaller}


def guess_format(dst: Path, src: str | os.PathLike[str], **options: Any) -> str:
    """The target format: by suffix (.gguf), by options that only one format has, by the source's format; else "hf"."""
    requested = given(options)
    if (implied := implied_format(dst, requested)) is not None:
        return implied
    if requested.keys() & {"codec", "recipe"}:
        return DEFAULT_TARGET
    source_form, _ = detect(src)
    return source_form.name if source_form.target is not None and not source_form.target.suffix else DEFAULT_TARGET


def implied_format(path: Path, requested: Mapping[str, Any]) -> str | None:
    """The format with the path's suffix, else the first whose target claims the options (see options.given) and stores
    the codec that they name.
    """
    for form, target in targets():
        if target.suffix and path.suffix.lower() == target.suffix:
            return form.name
    named = _codec_or_none(requested.get("codec"))
    for form, target in targets():
        if target.claims(requested) and (named is None or not isinstance(form, DeclaresCodecs) or form.writes(named)):
            return form.name
    return None


def _codec_or_none(name: str | None) -> Codec | None:
    """The codec; None for no name, and for one that no codec has, which the plan reports."""
    try:
        return None if name is None else codec_named(name)
    except UnknownNameError:
        return None


def check_disk(plan_: Plan, dst: Path, part: Part | None = None) -> None:
    """Raise PlanError now rather than OSError at the end. part: the share that is written."""
    if isinstance(dst, RemotePath):
        if dst.scheme in STREAMING:
            return
        dst = spool_path(dst)
    folder = dst.absolute().parent
    free = shutil.disk_usage(next(f for f in (folder, *folder.parents) if f.is_dir())).free
    need = plan_.nbytes if part is None else sum(t.nbytes for t in shares(plan_, part.count)[part.number - 1])
    if need > free + (held_bytes(dst.absolute()) if folder.is_dir() else 0):
        raise PlanError("not enough disk space", file=dst, expected=f"{need:,} bytes", found=f"{free:,} free")
