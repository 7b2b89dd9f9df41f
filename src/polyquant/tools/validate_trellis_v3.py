"""Validation of a Trellis folder: python -m polyquant.tools.validate_trellis_v3 models/Model-Trellis-v3

Runs all checks of `polyquant validate`. Exit 0: valid (notes allowed), 1: findings, 2: cannot be read.
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
"""Findings to print per code; the rest are counted."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse arguments, validate, print; return the exit code."""
    parser = argparse.ArgumentParser(prog="validate_trellis_v3", description="Validate a Trellis folder.")
    parser.add_argument("path", metavar="DIR")
    options = parser.parse_args(arguments)
    try:
        _, evidence = detect(options.path)
        if not evidence.name.startswith("trellis"):
            raise UnsupportedError(
                "not a Trellis folder",
                file=options.path,
                found=f"{evidence.name}: {evidence.why}",
                hint="use polyquant validate for other formats",
            )
        findings = validate(options.path)
    except (PolyquantError, OSError) as problem:
        print(f"validate_trellis_v3: {problem}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    _print(findings)
    serious = [f for f in findings if f.severity is not Severity.NOTE]
    if serious:
        print(f"{len(serious)} finding{'s' * (len(serious) > 1)}; polyquant explain {serious[0].code}")
    else:
        print(f"{printable(options.path)}: sound ({evidence.name})")
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
