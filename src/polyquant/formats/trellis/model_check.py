"""config.json of a Trellis folder against the tensors, and what it says of the quantization."""

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


def check_model(found: Survey) -> Iterator[Finding]:
    """Sizes and names by the architecture, and the entry `quantization_config`."""
    config = found.config
    if config is None:
        return
    if found.whole and not found.breaches:
        try:
            checkpoint = open(found.path)
        except PolyquantError:  # what stops the reader is a finding already
            return
        for tensor, message in mismatches(checkpoint):
            yield Finding("TRL006", ERROR, message, tensor, _FILE)
    if found.files.version == 3 and found.weights:
        yield from _entry(found, config.get("quantization_config"))


def _entry(found: Survey, entry: Any) -> Iterator[Finding]:
    if not isinstance(entry, Mapping) or entry.get("quant_method") != PLUGIN:
        yield Finding("TRL007", NOTE, "does not announce the quantization to transformers", file=_FILE)
        return
    content = found.metadata.content or {}
    widths = {facts.bits for facts in found.weights.values()}
    said = {
        "quantization_version": content.get("quantization_version"),
        "quantization_method": content.get("quantization_method"),
        "config_file": CONFIG,
    }
    for key, true in said.items():
        if true is not None and entry.get(key) != true:
            message = f"quantization_config has {key} {str(entry.get(key))[:40]!r}, {CONFIG} has {str(true)[:40]!r}"
            yield Finding("TRL008", WARNING, message, file=_FILE)
    if entry.get("bits") not in widths:
        message = f"quantization_config has bits {str(entry.get('bits'))[:20]}, the tensors have {sorted(widths)}"
        yield Finding("TRL008", WARNING, message, file=_FILE)
