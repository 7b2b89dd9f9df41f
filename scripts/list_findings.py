"""Writes docs/findings.md from the codes that the formats and `validate` explain; `--check` only compares (exit 1 if they differ)."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from polyquant.analysis.validate import CODES
from polyquant.registry import formats

PAGE = Path(__file__).resolve().parent.parent / "docs" / "findings.md"
_HEAD = """# Findings

For people who saw a code in the output of `polyquant validate` and want to know what it means, and for programs that act on codes.
Written by `scripts/list_findings.py`; the test suite fails when this page and the code differ.

A code never changes its meaning. `polyquant explain CODE` prints the whole text: what it means, what breaks, what to do.
Severity is part of a finding, not of its code. **error**: a reader fails or decodes wrongly. **warning**: some reader does. **note**: worth
knowing; notes alone leave the exit status at 0.
"""
_LONG = 170  # characters of one line in the table
_GROUPS = {
    "GGUF": "The structure of a GGUF file",
    "HF": "A Hugging Face folder or one weight file",
    "TRL": "A Trellis folder",
    "ASC": "An msModelSlim folder",
    "TEN": "The numbers of one tensor, whatever the format",
    "MOD": "The model as a whole",
    "CMP": "A comparison with the model it was made from (`validate --against`)",
}


def page() -> str:
    """The whole page; fails if a code belongs to no group."""
    codes = dict(CODES)
    for form in formats():
        codes |= form.findings
    text = _HEAD
    for group, title in _GROUPS.items():
        text += f"\n## {title}\n\n| code | what was found |\n|---|---|\n"
        for code in sorted(c for c in codes if re.fullmatch(rf"{group}\d{{3}}", c)):
            text += f"| `{code}` | {_first_sentence(codes.pop(code))} |\n"
    assert not codes, f"codes without a group: {', '.join(codes)}"
    return text


def _first_sentence(text: str) -> str:
    first = text.split(". ", 1)[0].removesuffix(".")
    if len(first) > _LONG:  # what stands before the colon says it, the rest explains
        first = first.split(": ", 1)[0]
    return first.replace("|", r"\|").replace("__", r"\_\_") + "."


def main(arguments: list[str]) -> int:
    """Write or check the page."""
    fresh = page()
    if "--check" in arguments:
        if PAGE.exists() and PAGE.read_text(encoding="utf-8") == fresh:
            return 0
        print(f"{PAGE.name} is out of step with the codes: run scripts/list_findings.py")
        return 1
    PAGE.write_text(fresh, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
