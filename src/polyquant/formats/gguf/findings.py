"""Collect the findings of one file while it is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from polyquant.errors import printable
from polyquant.types import Finding, Severity

__all__ = ["Findings"]

_KEPT_PER_CODE = 20  # a malicious file could have a million of them


@dataclass(slots=True)
class Findings:
    """Findings of one file; per code only the first ones are kept, and the total count."""

    file: str
    kept: list[Finding] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)

    def add(self, severity: Severity, code: str, message: str, tensor: str | None = None) -> None:
        """Add a finding."""
        self.seen[code] += 1
        if self.seen[code] <= _KEPT_PER_CODE:
            shown = None if tensor is None else printable(tensor)
            self.kept.append(Finding(code, severity, message, shown, self.file))

    def error(self, code: str, message: str, tensor: str | None = None) -> None:
        """Add a violation that llama.cpp rejects."""
        self.add(Severity.ERROR, code, message, tensor)

    def warning(self, code: str, message: str, tensor: str | None = None) -> None:
        """Add a violation that some reader rejects."""
        self.add(Severity.WARNING, code, message, tensor)

    def note(self, code: str, message: str, tensor: str | None = None) -> None:
        """Add a note."""
        self.add(Severity.NOTE, code, message, tensor)

    def first_error(self) -> Finding | None:
        """The error that makes opening fail."""
        return next((f for f in self.kept if f.severity is Severity.ERROR), None)

    def __iter__(self) -> Iterator[Finding]:
        yield from self.kept
        severities = {f.code: f.severity for f in self.kept}
        for code, n in self.seen.items():
            if n > _KEPT_PER_CODE:
                yield Finding(code, severities[code], f"and {n - _KEPT_PER_CODE} more of these", None, self.file)
