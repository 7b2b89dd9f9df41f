"""All finding codes and their explanations: validation, consumers, checksums, comparisons, certificates, formats."""

from __future__ import annotations

from polyquant.analysis import consumers, model_check, validate
from polyquant.analysis.certification import codes as certificate
from polyquant.analysis.integrity import findings as integrity
from polyquant.errors import UnknownNameError
from polyquant.registry import formats

__all__ = ["all_codes", "explain"]


def all_codes() -> dict[str, str]:
    """Code -> explanation of every finding, those of installed formats included."""
    known = validate.CODES | model_check.CODES | integrity.CODES | certificate.CODES | consumers.codes()
    for form in formats():
        known |= form.findings
    return known


def explain(code: str) -> str:
    """Explain a finding: its meaning, its consequences, what to do. Raises UnknownNameError with close codes."""
    known = all_codes()
    if code.upper() not in known:
        raise UnknownNameError("finding", code, known)
    return known[code.upper()]
