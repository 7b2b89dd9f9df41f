"""Write docs/formats/matrix.md: which packings keep the codes of which, from the traits of the codecs.

PYTHONPATH=src python scripts/matrix_page.py [--check]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from pages import write_or_check
from polyquant.analysis.matrix import FLOAT_PACKINGS, PACKINGS, Matrix, Pair, matrix
from polyquant.codecs.keeping import Fate

__all__ = ["page"]

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "docs/formats/matrix.md"
_TOP = """\
# Which codes can be kept

Written by `scripts/matrix_page.py` from the same rules that a conversion follows (`polyquant formats --matrix` prints
the table, `--format json` the reasons, and for a few codecs the sentences). A test packs all codes, with scales and
zero points of every kind, and compares each cell with the conversion (`tests/analysis/test_matrix.py`).

Rows are sources, columns targets. A packing represents its family; groups of 32 show what blocks of ggml can hold.

| symbol | codes | scales |
|---|---|---|
| = | equal | equal: every weight keeps its value |
| ~ | equal | equal if they fit the target's dtype, else rounded: the conversion measures by how much |
| ? | equal if zero points (or biases, or the scale of the tensor) allow, else impossible | |
| . | cannot be kept: only with `--requantize` | |

"""
_WHY = """
## Why some cannot

"""


def page() -> str:
    """The page."""
    integers, floats = matrix(), matrix(FLOAT_PACKINGS)
    tables = f"## Integers\n\n{_table(integers, PACKINGS)}\n## Small floats\n\n{_table(floats, FLOAT_PACKINGS)}"
    return _TOP + tables + _WHY + _reasons([*integers, *floats])


def _table(found: Matrix, names: Sequence[str]) -> str:
    head = "| from \\ to | " + " | ".join(str(i + 1) for i in range(len(names))) + " |\n"
    lines = [head, "|---|" + ":-:|" * len(names) + "\n"]
    for i, have in enumerate(names):
        cells = found[i * len(names) : (i + 1) * len(names)]
        lines.append(f"| {i + 1} `{have}` | " + " | ".join(p.symbol for p in cells) + " |\n")
    return "".join(lines)


def _reasons(found: Sequence[Pair]) -> str:
    reasons: dict[str, list[str]] = {}
    for pair in found:
        if pair.verdict.fate is Fate.IMPOSSIBLE:
            reasons.setdefault(pair.verdict.why, []).append(f"`{pair.have}` to `{pair.want}`")
    lines = [
        f"| {why} | {pairs[0]} | {len(pairs)} |\n" for why, pairs in sorted(reasons.items(), key=lambda r: -len(r[1]))
    ]
    return "| reason | for example | pairs |\n|---|---|---:|\n" + "".join(lines)


def main(arguments: list[str]) -> int:
    """Write or check the page."""
    return write_or_check(TARGET, page(), arguments, "matrix_page.py")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
