"""Check config.json of a Trellis folder against the tensors, and its entry for the quantization."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from polyquant.architectures.translate import mismatches
from polyquant.errors import PolyquantError
from polyquant.formats.trellis.folder import CONFIG
from polyquant.formats.trellis.open import open
from polyquant.formats.trellis.survey import PLUGIN, Survey
from polyquant.types import Finding, Severity

__all__ = ["check_model"]

ERROR, WARNING, NOTE = Severity.ERROR, Severity.WARNING, Severity.NOTE
_FILE = "config.json"


def check_model(contents: Survey) -> Iterator[Finding]:
    """Check names and sizes against the architecture, and the entry `quantization_config`."""
    config = contents.config
    if config is None:
        return
    if contents.complete and not contents.breaches:
        try:
            checkpoint = open(contents.path)
        except PolyquantError:  # already reported as a finding
            return
        for tensor, message in mismatches(checkpoint):
            yield Finding("TRL006", ERROR, message, tensor, _FILE)
    if contents.files.version == 3 and contents.weights:
        yield from _entry(contents, config.get("quantization_config"))


def _entry(contents: Survey, entry: Any) -> Iterator[Finding]:
    if not isinstance(entry, Mapping) or entry.get("quant_method") != PLUGIN:
        yield Finding("TRL007", NOTE, "does not declare the quantization to transformers", file=_FILE)
        return
    content = contents.metadata.content or {}
    widths = {facts.bits for facts in contents.weights.values()}
    declared = {
        "quantization_version": content.get("quantization_version"),
        "quantization_method": content.get("quantization_method"),
        "config_file": CONFIG,
    }
    for key, true in declared.items():
        if true is not None and entry.get(key) != true:
            message = f"quantization_config has {key} {str(entry.get(key))[:40]!r}, {CONFIG} has {str(true)[:40]!r}"
            yield Finding("TRL008", WARNING, message, file=_FILE)
    if entry.get("bits") not in widths:
        message = f"quantization_config has bits {str(entry.get('bits'))[:20]}, the tensors have {sorted(widths)}"
        yield Finding("TRL008", WARNING, message, file=_FILE)
