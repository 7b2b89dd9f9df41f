"""The main job: one checkpoint into another format, with every step planned, printed and measured."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypedDict, Unpack

from polyquant.calibration.importance import load_importance
from polyquant.codecs.tl import Tile
from polyquant.conversion.execute import Report, execute
from polyquant.conversion.plan import make_plan
from polyquant.conversion.steps import MSMODELSLIM, TRELLIS, Plan, with_name
from polyquant.errors import PlanError
from polyquant.formats.existing import refuse_target
from polyquant.formats.msmodelslim.options import MsModelSlimOptions, Smooth
from polyquant.formats.msmodelslim.plain_model import plain_model
from polyquant.formats.msmodelslim.ranges import read_ranges
from polyquant.formats.steps import Progress
from polyquant.formats.trellis.target import Effort, Method, TrellisOptions
from polyquant.opening import detect, open_checkpoint, with_tile
from polyquant.recipes.recipe import Rule, parse_rule
from polyquant.storage.work_folder import Resume, held_bytes
from polyquant.types import F32

__all__ = ["PlanOptions", "convert", "guess_format", "plan", "quantize", "smaller"]

DEFAULT_BITS = 4
"""Of a Trellis folder when nobody says."""


class PlanOptions(TypedDict, total=False):
    """What can be asked of a plan; see `plan`."""

    codec: str | None
    recipe: str | None
    rules: Sequence[Rule | str]
    requantize: bool
    importance: str | os.PathLike[str] | Mapping[str, F32] | None
    architecture: str | None
    ternary_layout: str | None
    tile: Tile | None
    shard_bytes: int | None
    bits: int | None
    effort: Effort | None
    codebook: str | None
    method: Method | None
    calibration: str | os.PathLike[str] | None
    target_bpw: float | None
    repair: bool
    axes: str | None
    kv: str | None
    smooth: Smooth | None
    dialect: str | None
    keep: Sequence[str]
    keep_error: float | None
    exact_tool: bool
    ranges: str | os.PathLike[str] | Mapping[str, tuple[float, float]] | None


def plan(
    src: str | os.PathLike[str],
    to: str,
    *,
    codec: str | None = None,
    recipe: str | None = None,
    rules: Sequence[Rule | str] = (),
    requantize: bool = False,
    importance: str | os.PathLike[str] | Mapping[str, F32] | None = None,
    architecture: str | None = None,
    ternary_layout: str | None = None,
    tile: Tile | None = None,
    shard_bytes: int | None = None,
    bits: int | None = None,
    effort: Effort | None = None,
    codebook: str | None = None,
    method: Method | None = None,
    calibration: str | os.PathLike[str] | None = None,
    target_bpw: float | None = None,
    repair: bool = False,
    axes: str | None = None,
    kv: str | None = None,
    smooth: Smooth | None = None,
    dialect: str | None = None,
    keep: Sequence[str] = (),
    keep_error: float | None = None,
    exact_tool: bool = False,
    ranges: str | os.PathLike[str] | Mapping[str, tuple[float, float]] | None = None,
    on_tensor: Callable[[int, int, str], None] | None = None,
) -> Plan:
    """Open `src` and decide every step and byte of its conversion to format `to` ("gguf", "hf", "trellis-v3", "msmodelslim"). Nothing is written.

    codec: one codec for all matrices; recipe: a built-in mix ("q4_k_m") or a .toml file; rules: `PATTERN=CODEC`, tried first.
    tile: (BM, BK, bm) of TL1 and TL2 tensors, in the source or the target; known models need none.
    importance: an imatrix file in GGUF form, or a mapping from target tensor name to float32 [K], of a stack also [experts, K].
    bits, effort, codebook: of a Trellis folder's linear layers (embeddings, head, norms and routers stay float unless a rule names them); effort
    "fast", "default", "max" is a window of 12, 14, 16 bits. Without bits, codec and recipe trellis codes are carried over as they are.
    calibration: a UTF-8 text on which the float model shows what its layers read, or "self" for text that it writes; then codes are searched for
    the least error of the layers' outputs (method "trellis_ldlq"), without it for that of the weights ("trellis_viterbi"). target_bpw: effective
    bits per quantized weight, scales counted; each weight gets 2 to 8 bits so that the model suffers least. on_tensor: told of that measurement.
    repair: weights of Metal Marlin as its quantizer meant them, not as its decoder reads them; axes: "kn" or "nk" of a Trellis source.
    kv, smooth, dialect, keep, keep_error, exact_tool: of an msModelSlim folder, see MsModelSlimOptions; there effort is "default" or "max", calibration what static types,
    kv, smooth and "max" look at. ranges: in place of it, linear layer -> (least, greatest) input, or a JSON file of them.
    Raises InputError, PlanError, UnknownNameError, CodecError.
    """
    said: dict[str, object] = {
        "--kv": kv,
        "--smooth": smooth,
        "--dialect": dialect,
        "--keep": keep,
        "--keep-error": keep_error,
        "--exact-tool": exact_tool,
        "--ranges": ranges,
    }
    if to != MSMODELSLIM and (first := next((name for name, value in said.items() if value), None)) is not None:
        raise PlanError(f"{first} is for msModelSlim folders", hint=f"add --to {MSMODELSLIM}")
    slim = to == MSMODELSLIM
    dialect = dialect or "v1"
    text = None if calibration is None else str(calibration)
    given = read_ranges(ranges, dialect) if isinstance(ranges, str | os.PathLike) else dict(ranges or {})
    ascend = (
        MsModelSlimOptions(kv, smooth, dialect, tuple(keep), exact_tool, effort, text, given, keep_error=keep_error)
        if slim
        else MsModelSlimOptions()
    )
    source = open_checkpoint(src, ternary_layout=ternary_layout, repair=repair, axes=axes)
    if source.format == MSMODELSLIM != to:
        source = plain_model(source)
    if tile is not None and source.format == "gguf":
        source = with_tile(source, tile)
    weights = load_importance(importance) if isinstance(importance, str | os.PathLike) else importance
    parsed = [parse_rule(r) if isinstance(r, str) else r for r in rules]
    return make_plan(
        source, to, codec=codec, recipe=recipe, rules=parsed, requantize=requantize, importance=weights,
        architecture=architecture, tile=tile, shard_bytes=shard_bytes,
        trellis=TrellisOptions(bits, None if slim else effort, codebook, method, None if slim else text, target_bpw), ascend=ascend, on_tensor=on_tensor,
    )  # fmt: skip


def convert(
    src: str | os.PathLike[str] | Plan,
    dst: str | os.PathLike[str],
    *,
    to: str | None = None,
    resume: Resume = "auto",
    overwrite: bool = False,
    threads: int | None = None,
    measure: bool = True,
    on_progress: Callable[[Progress], None] | None = None,
    **options: Unpack[PlanOptions],
) -> Report:
    """Convert `src` (a path, or a Plan made before) into `dst`, which appears only when whole.

    to: target format; by default what `guess_format` makes of the names. measure: the error of each tensor (of trellis codes always).
    options: as for `plan`. Returns the report with the measured errors. Raises InputError, PlanError, UnknownNameError, OSError.
    """
    target = Path(dst)
    if isinstance(src, Plan):
        made = src
    else:
        refuse_target(target, Path(src), overwrite=overwrite)
        made = plan(src, to or guess_format(target, src, **options), **options)
    made = with_name(made, target)
    check_disk(made, target)
    return execute(
        made, target, resume=resume, overwrite=overwrite, threads=threads, measure=measure, on_progress=on_progress
    )


def quantize(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    to: str | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    resume: Resume = "auto",
    overwrite: bool = False,
    threads: int | None = None,
    measure: bool = True,
    **options: Unpack[PlanOptions],
) -> Report:
    """`convert` for the case that the point is to make it smaller: unless told otherwise the recipe q4_k_m, 4 bits for a Trellis folder, w8a16 for msModelSlim."""
    to = to or guess_format(Path(dst), src, **options)
    return convert(
        src, dst, to=to, resume=resume, overwrite=overwrite, threads=threads, measure=measure, on_progress=on_progress,
        **smaller(to, options),
    )  # fmt: skip


def smaller(to: str, options: PlanOptions) -> PlanOptions:
    """The options of `quantize`, with its default where they do not say how small."""
    if any(options.get(key) is not None for key in ("codec", "recipe", "bits", "target_bpw")):
        return options
    default: PlanOptions = (
        {"bits": DEFAULT_BITS} if to == TRELLIS else {"codec": "w8a16"} if to == MSMODELSLIM else {"recipe": "q4_k_m"}
    )
    return {**options, **default}


def guess_format(dst: Path, src: str | os.PathLike[str], **options: Unpack[PlanOptions]) -> str:
    """GGUF for a name that ends in .gguf; an msModelSlim or Trellis folder for options that only such a one has, and from one; else a Hugging Face folder."""
    if dst.suffix.lower() == ".gguf":
        return "gguf"
    if (options.get("codec") or "").startswith(("w8a", "w4a")) or any(
        options.get(key) for key in ("kv", "smooth", "dialect", "keep", "keep_error", "exact_tool", "ranges")
    ):
        return MSMODELSLIM
    said = (options.get("codec") or "").startswith("trellis.") or any(
        options.get(key) is not None for key in ("bits", "target_bpw", "method", "calibration")
    )
    if said:
        return TRELLIS
    if options.get("codec") or options.get("recipe"):
        return "hf"
    found, evidence = detect(src)
    return TRELLIS if evidence.name.startswith("trellis") else MSMODELSLIM if found.name == MSMODELSLIM else "hf"


def check_disk(made: Plan, dst: Path) -> None:
    """PlanError in the first second rather than OSError in the last."""
    free = shutil.disk_usage(dst.absolute().parent).free
    if made.nbytes > free + held_bytes(dst.absolute()):
        raise PlanError(
            "not enough room on the disk", file=dst, expected=f"{made.nbytes:,} bytes", found=f"{free:,} free"
        )
