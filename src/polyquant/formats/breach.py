"""A broken rule of a folder: `open` raises it, `check` reports it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from polyquant.errors import InputError, PolyquantError, RemoteError
from polyquant.storage.folder import LeavesFolderError
from polyquant.types import Finding, Severity

__all__ = ["Breach", "breach_of"]


@dataclass(frozen=True, slots=True)
class Breach:
    """A rule that a folder breaks. code: see the format's codes.py; stops: `open` raises it, since weights cannot be
    read.
    """

    code: str
    message: str
    file: Path | None = None
    tensor: str | None = None
    expected: object = None
    found: object = None
    hint: str | None = None
    stops: bool = True

    def error(self) -> InputError:
        """The breach as an exception."""
        return InputError(
            self.message, file=self.file, tensor=self.tensor, expected=self.expected, found=self.found, hint=self.hint
        )

    def finding(self) -> Finding:
        """The breach as a finding."""
        bare = InputError(self.message, expected=self.expected, found=self.found, hint=self.hint)
        return Finding(self.code, Severity.ERROR, str(bare), self.tensor, self.file.name if self.file else None)


def breach_of(error: PolyquantError, code: str, file: Path, tensor: str | None = None, *, leaves: str) -> Breach:
    """The breach for an error. leaves: the code for files outside the folder. Raises a RemoteError: it is none."""
    if isinstance(error, RemoteError):
        raise error
    where = error.file if isinstance(error.file, Path) else file
    if isinstance(error, LeavesFolderError):
        code = leaves
    named = error.tensor if isinstance(error.tensor, str) else tensor
    return Breach(code, error.message, where, named, error.expected, error.found, error.hint)
