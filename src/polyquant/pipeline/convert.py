"""The main job: one checkpoint into another format, with every step planned, printed and measured."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from polyquant.codecs.tl import Tile
from polyquant.errors import PlanError
from polyquant.formats.detect import open_checkpoint, with_tile
from polyquant.pipeline.execute import Progress, Report, execute
from polyquant.pipeline.importance import load_importance
from polyquant.pipeline.plan import Plan, make_plan, with_name
from polyquant.pipeline.recipe import Rule, parse_rule
from polyquant.storage.staging import Resume, refuse_target
from polyquant.types import F32

__all__ = ["convert", "plan", "quantize"]


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
) -> Plan:
    """Open `src` and decide every step and byte of its conversion to format `to` ("gguf", "hf"). Nothing is written.

    codec: one codec for all matrices; recipe: a built-in mix ("q4_k_m") or a .toml file; rules: `PATTERN=CODEC`, tried first.
    tile: (BM, BK, bm) of TL1 and TL2 tensors, in the source or the target; known models need none.
    importance: an imatrix file in GGUF form, or a mapping from target tensor name to float32 [K].
    Raises InputError, PlanError, UnknownNameError.
    """
    source = open_checkpoint(src, ternary_layout=ternary_layout)
    if tile is not None and source.format == "gguf":
        source = with_tile(source, tile)
    weights = load_importance(importance) if isinstance(importance, str | os.PathLike) else importance
    parsed = [parse_rule(r) if isinstance(r, str) else r for r in rules]
    return make_plan(
        source, to, codec=codec, recipe=recipe, rules=parsed, requantize=requantize, importance=weights,
        architecture=architecture, tile=tile, shard_bytes=shard_bytes,
    )  # fmt: skip


def convert(
    src: str | os.PathLike[str] | Plan,
    dst: str | os.PathLike[str],
    *,
    to: str | None = None,
    codec: str | None = None,
    recipe: str | None = None,
    rules: Sequence[Rule | str] = (),
    requantize: bool = False,
    importance: str | os.PathLike[str] | Mapping[str, F32] | None = None,
    architecture: str | None = None,
    ternary_layout: str | None = None,
    tile: Tile | None = None,
    shard_bytes: int | None = None,
    resume: Resume = "auto",
    overwrite: bool = False,
    threads: int | None = None,
    measure: bool = True,
    on_progress: Callable[[Progress], None] | None = None,
) -> Report:
    """Convert `src` (a path, or a Plan made before) into `dst`, which appears only when whole.

    to: target format; by default GGUF for a name that ends in .gguf, else a Hugging Face folder. The rest as for `plan`.
    Returns the report with the measured error of each tensor. Raises InputError, PlanError, UnknownNameError, OSError.
    """
    target = Path(dst)
    if isinstance(src, Plan):
        made = src
    else:
        refuse_target(target, Path(src), overwrite=overwrite)
        made = plan(
            src, to or guess_format(target), codec=codec, recipe=recipe, rules=rules, requantize=requantize, importance=importance,
            architecture=architecture, ternary_layout=ternary_layout, tile=tile, shard_bytes=shard_bytes,
        )  # fmt: skip
    made = with_name(made, target)
    check_disk(made, target)
    return execute(
        made, target, resume=resume, overwrite=overwrite, threads=threads, measure=measure, on_progress=on_progress
    )


def quantize(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    recipe: str | None = None,
    codec: str | None = None,
    **options: Any,
) -> Report:
    """`convert` for the case that the point is to make it smaller: the recipe q4_k_m unless told otherwise; options as there."""
    return convert(src, dst, recipe=recipe if recipe or codec else "q4_k_m", codec=codec, **options)


def guess_format(dst: Path) -> str:
    """What a target's name asks for."""
    return "gguf" if dst.suffix.lower() == ".gguf" else "hf"


def check_disk(made: Plan, dst: Path) -> None:
    """PlanError in the first second rather than OSError in the last."""
    free = shutil.disk_usage(dst.absolute().parent).free
    partial = dst.absolute().parent / f".{dst.name}.partial"
    held = sum(f.stat().st_blocks * 512 for f in partial.iterdir()) if partial.is_dir() else 0
    if made.nbytes > free + held:
        raise PlanError(
            "not enough room on the disk", file=dst, expected=f"{made.nbytes:,} bytes", found=f"{free:,} free"
        )
