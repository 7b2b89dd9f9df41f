"""Explain any finding code: of a validation, a comparison, a format or a certificate."""

from __future__ import annotations

from polyquant.analysis import validate
from polyquant.analysis.certification.codes import CODES

__all__ = ["explain"]


def explain(code: str) -> str:
    """Explain a finding: its meaning, its consequences, what to do. Raises UnknownNameError with close codes."""
    own = CODES.get(code.upper())
    return validate.explain(code) if own is None else own
