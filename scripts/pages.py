"""Shared by the scripts that write pages of docs/: writing a page, or checking that the stored one is up to date."""

from __future__ import annotations

from pathlib import Path

__all__ = ["write_or_check"]


def write_or_check(page: Path, text: str, arguments: list[str], script: str) -> int:
    """Write the page; with --check among the arguments only compare it. Returns the exit status."""
    if "--check" not in arguments:
        page.write_text(text, encoding="utf-8")
        return 0
    if page.exists() and page.read_text(encoding="utf-8") == text:
        return 0
    print(f"{page.name} is out of date: PYTHONPATH=src python scripts/{script}")
    return 1
