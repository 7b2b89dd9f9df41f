"""Tests that cannot run under sanitizers (`make check-sanitized`), by the start of their names, and why."""

from __future__ import annotations

__all__ = ["UNSANITIZED", "reason"]

_SPACE = "limits its address space, of which the address sanitizer reserves terabytes"
_TIME = "limits processor time, of which sanitizers need several times more"
_MEMORY = "limits memory, of which the address sanitizer needs several times more"

UNSANITIZED = {
    "fuzz/test_targets.py": _SPACE,
    "cli/test_hostile.py": f"{_MEMORY}; {_TIME}",
    "conversion/test_memory.py": _MEMORY,
    "docs/test_console.py::test_commands": "starts a hundred interpreters, each with the sanitizers",
    "crash/test_every_point.py::test_no_change_escapes": "strace would see the calls of the sanitizers",
}


def reason(name: str) -> str | None:
    """Return why a test cannot run under sanitizers; None if it can. name: relative to this folder."""
    return next((why for start, why in UNSANITIZED.items() if name.startswith(start)), None)
