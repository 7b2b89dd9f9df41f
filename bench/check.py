"""Compare two files of figures that bench/run.py wrote: `make bench-check OLD=before.json NEW=after.json`.

A row is compared by its ratio to the peer, if both files have one of the same version: then a busy or different machine
matters little. Without a peer it is compared by its own value, which needs the same machine and the same instruction
set. It is slower or faster if the change exceeds LEAST and twice the noise of both runs. Exit status 1 if a row is
slower or missing, 2 for a file that holds no figures.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LEAST = 0.05
"""Relative change below which a row counts as equal."""
UNKNOWN = 0.2
"""The same for rows that were measured once."""
_SAME = ("engine", "processor", "machine", "cores")
"""Properties that must agree where rows are compared by their own values."""


@dataclass(frozen=True, slots=True)
class Change:
    """One row in both files. factor: new speed / old speed; noise: the relative change that may be chance."""

    name: str
    factor: float
    noise: float
    by: str

    def __str__(self) -> str:
        return f"{self.name}: {self.factor:.3g} times ({self.by}, noise {self.noise:.0%})"


def read(path: Path) -> dict[str, Any]:
    """Return the figures of a file. Raises ValueError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise ValueError(f"{path}: {(problem.strerror or str(problem)).lower()}") from None
    except ValueError as problem:
        raise ValueError(f"{path}: no JSON: {problem}") from None
    sections = found.get("sections") if isinstance(found, dict) else None
    if not isinstance(sections, dict) or not isinstance(found.get("machine"), dict):
        raise ValueError(f"{path}: no figures of bench/run.py --json")
    return found


def table(figures: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the rows by section and name, each with the versions of its section's peers. Raises ValueError."""
    rows = {}
    for section in figures["sections"].values():
        for row in section["rows"]:
            if "more" not in row or "noise" not in row:
                raise ValueError("the figures are of an earlier version of bench/run.py: measure again")
            rows[section["section"], row["name"]] = {**row, "peers": section["peers"]}
    return rows


def changes(old: dict[str, Any], new: dict[str, Any]) -> Iterator[Change]:
    """Yield the comparison of each row that both files have and that can be compared."""
    alike = all(old["machine"].get(key) == new["machine"].get(key) for key in _SAME)
    before, after = table(old), table(new)
    for key in before.keys() & after.keys():
        a, b = before[key], after[key]
        known = a["noise"] is not None and b["noise"] is not None
        noise = max(LEAST, 2 * math.hypot(a["noise"], b["noise"])) if known else UNKNOWN
        name = f"{key[0]}: {key[1]}"
        if a["ratio"] and b["ratio"] and a["peers"] == b["peers"]:
            yield Change(name, b["ratio"] / a["ratio"], noise, "ratio to the peer")
        elif alike and a["ours"] and b["ours"]:
            yield Change(name, b["ours"] / a["ours"] if a["more"] else a["ours"] / b["ours"], noise, "own value")


def main() -> int:
    """Print what became slower, faster, or cannot be compared."""
    parser = argparse.ArgumentParser(description="compare two files of figures")
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    args = parser.parse_args()
    try:
        old, new = read(args.old), read(args.new)
        found = sorted(changes(old, new), key=lambda change: change.factor)
        before, after = table(old), table(new)
    except ValueError as problem:
        print(f"bench-check: {problem}", file=sys.stderr)
        return 2
    for key in sorted(old["machine"].keys() | new["machine"].keys()):
        if (was := old["machine"].get(key)) != (now := new["machine"].get(key)):
            print(f"differs: {key} {was}, now {now}")
    slower = [change for change in found if change.factor < 1 - change.noise]
    faster = [change for change in found if change.factor > 1 / (1 - min(change.noise, 0.9))]
    measured = {section["section"] for section in new["sections"].values()}
    missing = sorted(key for key in before.keys() - after.keys() if key[0] in measured)
    for label, some in (("slower", slower), ("faster", faster[::-1])):
        for change in some:
            print(f"{label}: {change}")
    for section, name in missing:
        print(f"missing: {section}: {name}")
    apart = len(before.keys() & after.keys()) - len(found)
    print(
        f"{len(found)} rows compared: {len(slower)} slower, {len(faster)} faster, {len(missing)} missing"
        + (f"; {apart} not comparable between these machines or peers" if apart else "")
    )
    return int(bool(slower or missing))


if __name__ == "__main__":
    sys.exit(main())
