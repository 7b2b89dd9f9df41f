"""Findings of a validation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from polyquant.errors import printable
from polyquant.tables import Listing

__all__ = ["Finding", "Findings", "Severity"]


class Severity(Enum):
    """error: a reader will fail or decode wrongly; warning: some reader will; note: worth knowing."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True, slots=True, repr=False)
class Finding:
    """One finding of a validation: a stable code (`polyquant explain CODE`), the place, and the observation."""

    code: str
    severity: Severity
    message: str
    tensor: str | None = None
    file: str | None = None

    def __str__(self) -> str:
        where = "".join(f" {printable(x)}:" for x in (self.file, self.tensor) if x)
        return f"{self.code} {self.severity.value}{where} {printable(self.message, 600)}"

    def __repr__(self) -> str:
        return f"<Finding {self}>"


class Findings(Listing[Finding]):
    """The result of `validate`: a list of findings, empty for a valid checkpoint."""

    title = "findings"
    columns = ("code", "severity", "file", "tensor", "message")

    def row(self, entry: Finding) -> Sequence[object]:
        """The cells of one finding."""
        return entry.code, entry.severity.value, entry.file or "", entry.tensor or "", entry.message
