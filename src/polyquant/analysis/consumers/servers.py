"""Conditions that vLLM and SGLang share. Each program passes its own rules, and gets their findings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from polyquant.analysis.consumers.model import Model
from polyquant.analysis.consumers.parallel import blocks, fused_rows
from polyquant.analysis.consumers.record import Rule
from polyquant.types import Finding

__all__ = ["MARLIN_GROUPS", "block_parts", "dense_mxfp4", "fp8_settings", "gptq_settings", "missing"]

MARLIN_GROUPS = (-1, 32, 64, 128)
"""Columns per scale of the Marlin kernels; -1 is the whole row."""


def missing(rule: Rule, model: Model, settings: Mapping[str, Any], *wanted: str) -> Iterator[Finding]:
    """Entries that the settings lack. wanted: names, or alternatives separated by "|"."""
    for names in wanted:
        if not any(name in settings for name in names.split("|")):
            yield rule.finding(f"no entry {names.split('|')[0]}", file=model.settings_file)


def gptq_settings(settings: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The GPTQ settings, and those with the changes of each rule in `dynamic`: (" in the rule PATTERN" or "", entries).

    Rules that leave layers unquantized are omitted.
    """
    dynamic = settings.get("dynamic")
    for pattern, changes in ({"": {}} | (dict(dynamic) if isinstance(dynamic, Mapping) else {})).items():
        if not pattern.startswith("-:") and isinstance(changes, Mapping):
            yield f" in the rule {pattern}" if pattern else "", {**settings, **changes}


def fp8_settings(rule: Rule, model: Model, settings: Mapping[str, Any]) -> Iterator[Finding]:
    """activation_scheme and weight_block_size that the programs reject."""
    scheme, size = settings.get("activation_scheme", "dynamic"), settings.get("weight_block_size")
    if scheme not in ("dynamic", "static") or (size is not None and scheme != "dynamic"):
        yield rule.finding(f"activation_scheme {scheme}", file=model.settings_file)
    if size is not None and (not isinstance(size, list) or len(size) != 2):
        yield rule.finding(f"weight_block_size {size}", file=model.settings_file)


def block_parts(rule: Rule, model: Model, *, last: bool) -> Iterator[Finding]:
    """Parts of joined layers whose rows do not fill blocks. last: whether the last part must fill them too."""
    size = blocks(model)
    for name, rows in fused_rows(model, size[0], last=last) if size else ():
        yield rule.finding(f"{rows} rows, in blocks of {size[0] if size else 0}", f"{name}.weight")


def dense_mxfp4(rule: Rule, model: Model) -> Iterator[Finding]:
    """Packed linear layers outside the experts."""
    for name, parts in model.with_part("weight_scale"):
        if ".experts." not in name and parts.get("weight", parts["weight_scale"]).dtype == "U8":
            yield rule.finding("a packed linear layer", f"{name}.weight")
