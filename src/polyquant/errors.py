"""Every error that polyquant raises on purpose.

    PolyquantError             exit code 2; str() is one line that a person can act on
    ├── InputError             the bytes we were given are wrong: truncated, contradictory, hostile
    ├── UnsupportedError       sound input that asks for something we do not do (yet); says what instead
    ├── PlanError              the job as asked is refused: lossy without leave, target exists, disk too small
    ├── UnknownNameError       no codec, format or finding of that name; says which are near
    └── CodecError             arrays that do not fit the codec: shape, dtype, range

A bug of ours is never one of these: it surfaces as the exception it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

__all__ = [
    "CodecError",
    "InputError",
    "PlanError",
    "PolyquantError",
    "UnknownNameError",
    "UnsupportedError",
    "printable",
]


def printable(text: object, limit: int = 200) -> str:
    """Text from a file made safe for a terminal: control characters escaped, overlong names cut."""
    shown = "".join(
        c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode()
        for c in str(text)[: limit + 1]
    )
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


class PolyquantError(Exception):
    """Base of all: `where` (file, tensor), what is wrong, `expected`, `found`, and `hint` (what to do)."""

    def __init__(
        self,
        message: str,
        *,
        file: object = None,
        tensor: object = None,
        expected: object = None,
        found: object = None,
        hint: str | None = None,
    ) -> None:
        self.message, self.file, self.tensor = message, file, tensor
        self.expected, self.found, self.hint = expected, found, hint
        super().__init__(message)

    def __str__(self) -> str:
        where = "".join(f"{printable(x)}: " for x in (self.file, self.tensor) if x is not None)
        detail = []
        if self.expected is not None:
            detail.append(f"expected {printable(self.expected)}")
        if self.found is not None:
            detail.append(f"found {printable(self.found)}")
        text = where + printable(self.message, 600) + (f" ({', '.join(detail)})" if detail else "")
        return text + (f"; {self.hint}" if self.hint else "")


class InputError(PolyquantError):
    """The input is broken."""


class UnsupportedError(PolyquantError):
    """The input is sound; we cannot do what was asked of it."""


class PlanError(PolyquantError):
    """The job is refused before any work."""


class CodecError(PolyquantError):
    """Arrays that the codec cannot take."""


class UnknownNameError(PolyquantError, LookupError):
    """A name that nothing answers to."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        known = sorted(known)
        near = get_close_matches(name.lower(), known, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(known)}"
        super().__init__(f"no {kind} is called '{name}'", hint=hint)
