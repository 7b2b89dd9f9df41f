"""Draw docs/images/quality.svg from the table of bench/trellis_perplexity.py (needs matplotlib):

python bench/trellis_perplexity.py --effort fast > table.md
python scripts/quality_chart.py table.md docs/images/quality.svg
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt

SERIES = {
    "K-quant": ("#8a8f98", "s", r"q\d_k"),
    "K-quant, importance matrix": ("#4c6ef5", "o", r"q\d_k, importance"),
    "Trellis, Viterbi": ("#f59f00", "^", r"trellis, viterbi"),
    "Trellis, LDLQ calibration": ("#2f9e44", "D", r"trellis, ldlq"),
}
"""Label -> colour, marker, pattern of the rows."""


def points(table: str, pattern: str) -> list[tuple[float, float]]:
    """(bits per weight, mean KL divergence) of the rows whose first cell matches, by increasing bits."""
    rows = [[cell.strip() for cell in line.strip("| \n").split("|")] for line in table.splitlines()]
    return sorted((float(row[1]), float(row[4])) for row in rows if len(row) == 6 and re.fullmatch(pattern, row[0]))


def main(table: str, target: str) -> None:
    """Write the chart."""
    matplotlib.rcParams.update({"svg.fonttype": "none", "font.family": "sans-serif", "svg.hashsalt": "polyquant"})
    figure, axes = plt.subplots(figsize=(8, 4.2))
    text = Path(table).read_text(encoding="utf-8")
    for label, (colour, marker, pattern) in SERIES.items():
        found = points(text, pattern)
        axes.plot(*zip(*found, strict=True), color=colour, marker=marker, markersize=6, linewidth=1.8, label=label)
    axes.set_yscale("log")
    axes.set_xlabel("bits per weight of the linear layers, all bytes counted")
    axes.set_ylabel("mean KL divergence, nats per token")
    axes.set_title("Divergence from the bfloat16 model (lower is better)", loc="left", fontsize=11)
    axes.grid(True, which="both", linewidth=0.4, color="#dddddd")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    figure.tight_layout()
    figure.savefig(target, metadata={"Date": None})


if __name__ == "__main__":
    main(*sys.argv[1:])
