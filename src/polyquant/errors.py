"""The errors that polyquant raises on purpose.

    PolyquantError             exit code 2; str() is one actionable line
    ├── InputError             invalid input bytes: truncated, contradictory, malicious
    ├── RemoteError            a URL could not be read: network, server, permission, a missing package
    ├── UnsupportedError       valid input that asks for an unsupported feature; names the alternative
    ├── PlanError              the requested job is rejected: lossy without permission, target exists, disk too small
    │   └── UnusedCalibrationError   a calibration text that no weight uses
    ├── UnknownNameError       no codec, format or finding of that name; suggests close ones
    │   └── UnknownTensorError no tensor of that name in a checkpoint; a KeyError too
    └── CodecError             arrays that do not fit the codec: shape, dtype, range

Bugs are never one of these: they surface as other exceptions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches
from heapq import nlargest
from os.path import commonprefix

__all__ = [
    "CodecError",
    "InputError",
    "PlanError",
    "PolyquantError",
    "RemoteError",
    "UnknownNameError",
    "UnknownTensorError",
    "UnsupportedError",
    "UnusedCalibrationError",
    "escaped",
    "listed",
    "masked",
    "printable",
]


_USER = re.compile(r"(https?://)[^/\s@]+@", re.IGNORECASE)
_QUERY = re.compile(r"(https?://[^\s?'\"]+)\?[^\s'\"…]+", re.IGNORECASE)
_NAME = 80
"""Maximum characters of a name in a list of names, or of an unknown name."""
_MESSAGE = 600
_KNOWN = 6
"""Number of names listed if none is close: codecs have dozens, files thousands."""
_COMPARED = 1000
"""Maximum number of names compared with a misspelt one: a comparison takes up to a millisecond."""


def escaped(text: object) -> str:
    """Escape text to one line without terminal control: control and format characters, line ends, surrogates, odd
    spaces.
    """
    shown = str(text)
    if shown.isprintable():
        return shown
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in shown)


def masked(text: str) -> str:
    """Remove user names, passwords and query strings, which may be signatures, from the URLs of a message."""
    if "://" not in text:
        return text
    return _QUERY.sub(r"\1?…", _USER.sub(r"\1…@", text))


def printable(text: object, limit: int = 200) -> str:
    """Text from a file made safe for a terminal: escaped, and cut if too long."""
    shown = escaped(str(text)[: limit + 1])
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def listed(names: Iterable[str], most: int = 3) -> str:
    """The first of many names: "a, b, c and 5 more"."""
    known = list(names)
    more = f" and {len(known) - most} more" if len(known) > most else ""
    return ", ".join(printable(name, _NAME) for name in known[:most]) + more


def _near(name: str, known: list[str]) -> list[str]:
    """Up to three similar names: first those with the same letters and digits or with this prefix.

    Of very many names, as a file may contain, only those with a similar beginning or end are compared.
    """

    def shared(other: str) -> int:
        pairs = ((name, other), (name[::-1], other[::-1]))
        return sum(len(commonprefix(pair)) for pair in pairs)  # noqa: RUF071 - letters, not paths

    likely = known if len(known) <= _COMPARED else nlargest(_COMPARED, known, key=shared)
    bare = _bare(name)
    spelt = {k: _bare(k) for k in likely} if len(bare) > 1 else {}
    if same := [k for k, letters in spelt.items() if letters == bare]:
        return same[:3]
    longer = sorted((k for k, letters in spelt.items() if letters.startswith(bare)), key=lambda k: (len(k), k))
    return list(dict.fromkeys((*longer, *get_close_matches(name, likely, n=3, cutoff=0.52))))[:3]


def _bare(name: str) -> str:
    """Letters and digits only: users write q4k, trellis:3, w8a16-g128."""
    return "".join(filter(str.isalnum, name)).lower()


class PolyquantError(Exception):
    """Base of all errors: file, tensor, the problem, `expected`, `found`, and `hint` (what to do).

    Each may quote a file: str() escapes and limits them, and removes credentials from URLs; the attributes are
    unchanged.
    """

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
        text = where + printable(self.message, _MESSAGE) + (f" ({', '.join(detail)})" if detail else "")
        return masked(text + (f"; {printable(self.hint, _MESSAGE)}" if self.hint else ""))


class InputError(PolyquantError):
    """Invalid input."""


class RemoteError(PolyquantError):
    """A URL that could not be read; its file may be valid."""


class UnsupportedError(PolyquantError):
    """Valid input with an unsupported feature or request."""


class PlanError(PolyquantError):
    """A job that is rejected before any work."""


class UnusedCalibrationError(PlanError):
    """A calibration text that no weight of the job uses."""


class CodecError(PolyquantError):
    """Arrays that the codec cannot take."""


class UnknownNameError(PolyquantError, LookupError):
    """An unknown name."""

    def __init__(self, kind: str, name: str, known: Iterable[str], *, hint: str | None = None) -> None:
        known = sorted(known)
        spelt = {k.lower(): k for k in known if len(k) <= 2 * _NAME}
        near = [spelt[n] for n in _near(name[: 2 * _NAME].lower(), list(spelt))]
        suggestions = " or ".join(printable(n, _NAME) for n in near)
        if hint is None:
            hint = f"did you mean {suggestions}?" if near else f"known: {listed(known, _KNOWN)}" if known else None
        super().__init__(f"no {kind} is named '{printable(name, _NAME)}'", hint=hint)


class UnknownTensorError(UnknownNameError, KeyError):
    """A checkpoint has no tensor of that name. other: the tensor's name in the checkpoint's own naming scheme."""

    def __init__(self, file: object, name: str, known: Iterable[str], other: str | None = None) -> None:
        super().__init__("tensor", name, known)
        self.file = file
        if other is not None:
            self.hint = f"this checkpoint calls it '{printable(other, _NAME)}'"
