"""Keywords of `open`, `plan`, `convert` and `quantize` for type checkers and editors.

Generated: change the option classes of the formats (formats/*/options.py), then run scripts/make_keywords.py. The test
suite fails when they differ.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict

if TYPE_CHECKING:
    from polyquant.recipes.recipe import Rule
    from polyquant.types import F32

__all__ = ["OPEN_DEFAULTS", "PLAN_DEFAULTS", "ChoiceKeywords", "FormatKeywords", "OpenKeywords", "PlanKeywords"]


class OpenKeywords(TypedDict, total=False):
    """Keywords of `open`: properties of a source that its bytes do not show."""

    ternary_layout: str | None
    dialect: str | None
    tile: tuple[int, int, int] | None
    repair: bool
    axes: str | None


class FormatKeywords(TypedDict, total=False):
    """Keywords of `plan` for formats: options of the targets, and open options of the source."""

    ternary_layout: str | None
    dialect: str | None
    tile: tuple[int, int, int] | None
    repair: bool
    axes: str | None
    kv: str | None
    smooth: Literal["m1", "m4", "shift"] | None
    keep: Sequence[str]
    exact_tool: bool
    effort: str | None
    calibration: str | os.PathLike[str] | None
    ranges: Mapping[str, tuple[float, float]] | str | os.PathLike[str] | None
    keep_error: float | None
    shard_bytes: int | None
    architecture: str | None
    pre_tokenizer: str | None
    bits: int | None
    codebook: str | None
    method: Literal["trellis_viterbi", "trellis_ldlq"] | None
    target_bpw: float | None
    scheme: str | None
    single_file: bool


class ChoiceKeywords(TypedDict, total=False):
    """Keywords of `plan` for every format."""

    codec: str | None
    recipe: str | None
    rules: Sequence[Rule | str]
    requantize: bool
    allow_unknown: bool
    importance: str | os.PathLike[str] | Mapping[str, F32] | None
    on_tensor: Callable[[int, int, str], None] | None
    measured: Mapping[str, Any] | None


class PlanKeywords(ChoiceKeywords, FormatKeywords, total=False):
    """All keywords of `plan`, which `convert` and `quantize` also accept."""


OPEN_DEFAULTS: Mapping[str, Any] = {
    "repair": False,
}
"""Defaults that are not None."""
PLAN_DEFAULTS: Mapping[str, Any] = {
    "rules": (),
    "requantize": False,
    "allow_unknown": False,
    "repair": False,
    "keep": (),
    "exact_tool": False,
    "single_file": False,
}
"""Defaults that are not None."""
