"""python -m polyquant.tools.validate_trellis_v3 models/Model-Trellis-v3

All that `polyquant validate` checks of a Trellis folder. Exit 0: sound (notes allowed), 1: findings, 2: cannot be read.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence

from polyquant.analysis.validate import validate
from polyquant.errors import PolyquantError, UnsupportedError, printable
from polyquant.opening import detect
from polyquant.types import Finding, Severity

__all__ = ["main"]

_SHOWN = 20
"""Findings of one code that are printed; the rest are counted."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, validate, print; the exit code."""
    parser = argparse.ArgumentParser(prog="validate_trellis_v3", description="Is this Trellis folder sound?")
    parser.add_argument("path", metavar="DIR")
    asked = parser.parse_args(arguments)
    try:
        _, evidence = detect(asked.path)
        if not evidence.name.startswith("trellis"):
            raise UnsupportedError(
                "not a Trellis folder", file=asked.path, found=f"{evidence.name}: {evidence.why}", hint="polyquant validate reads other formats"
            )  # fmt: skip
        found = validate(asked.path)
    except (PolyquantError, OSError) as problem:
        print(f"validate_trellis_v3: {problem}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    _print(found)
    serious = [f for f in found if f.severity is not Severity.NOTE]
    if serious:
        print(f"{len(serious)} findings; polyquant explain {serious[0].code}")
    else:
        print(f"{printable(asked.path)}: sound ({evidence.name})")
    return 1 if serious else 0


def _print(findings: Sequence[Finding]) -> None:
    seen: Counter[str] = Counter()
    for finding in findings:
        seen[finding.code] += 1
        if seen[finding.code] <= _SHOWN:
            print(finding)
    for code, count in seen.items():
        if count > _SHOWN:
            print(f"{code}: {count - _SHOWN} more")


if __name__ == "__main__":
    sys.exit(main())
