"""Side by side with peers: `python bench/run.py [SECTION ...] [--json bench/results.json]`.

Every file bench/bench_<section>.py is a section (see measure.py). Exit status 1 if a bar was missed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.console import Console
from rich.table import Table

from measure import Row, Section

HERE = Path(__file__).resolve().parent
NAMES = sorted(p.stem.removeprefix("bench_") for p in HERE.glob("bench_*.py"))


def release(package: str) -> str | None:
    """The installed version of a peer, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def machine() -> dict[str, object]:
    """What the figures depend on."""
    from polyquant.ops import native

    return {
        "polyquant": release("polyquant"),
        "engine": native.instruction_set(),
        "python": platform.python_version(),
        "numpy": release("numpy"),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
    }


def number(x: float | None) -> str:
    """Three significant digits, a dash for none."""
    return "-" if x is None else f"{x:#.3g}".rstrip(".") if abs(x) < 1000 else f"{x:,.0f}"


def table(section: Section, rows: list[Row]) -> Table:
    """The section as printed."""
    extra = list(dict.fromkeys(key for row in rows for key in row.extra))
    out = Table("", "unit", "ours", "peer", "times", "bar", "met", *extra, title=section.title, title_justify="left")
    for column in out.columns[2:]:
        column.justify = "right"
    for row in rows:
        met = {None: "", True: "yes", False: "[bold red]NO[/]"}[row.met]
        numbers = [number(x) for x in (row.ours, row.peer, row.ratio, row.bar)]
        out.add_row(row.name, row.unit, *numbers, met, *(number(row.extra.get(key)) for key in extra))
    return out


def markdown(results: dict, sections: list[tuple[Section, list[Row]]]) -> str:
    """docs/benchmarks.md: every section as a table."""
    facts = ", ".join(f"{key} {value}" for key, value in results["machine"].items())
    lines = [
        "# Benchmarks",
        "",
        "Made by `make bench`: ours and each peer take turns in one run, medians; the machine is shared, so read the ratios, not the times.",
        "A bar is a promise about the ratio (`times`); rows without one are there to be watched.",
        "",
        facts + ".",
    ]
    for section, rows in sections:
        extra = list(dict.fromkeys(key for row in rows for key in row.extra))
        peers = ", ".join(f"{p} {v or 'not installed'}" for p, v in results["sections"][section.title]["peers"].items())
        lines += ["", f"## {section.title[0].upper()}{section.title[1:]}", ""]
        lines += [f"Peer: {peers}.", ""] if peers else []
        lines.append("| | unit | ours | peer | times | bar | met | " + " | ".join(extra) + (" |" if extra else ""))
        lines.append("|---|---|---:|---:|---:|---:|---|" + "---:|" * len(extra))
        for r in rows:
            cells = [r.name, r.unit, *(number(x) for x in (r.ours, r.peer, r.ratio, r.bar))]
            cells.append({None: "", True: "yes", False: "**no**"}[r.met])
            lines.append("| " + " | ".join([*cells, *(number(r.extra.get(key)) for key in extra)]) + " |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Measure the sections asked for, print them, write them."""
    parser = argparse.ArgumentParser(description="polyquant side by side with its peers")
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"default: all of {', '.join(NAMES)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures, e.g. to bench/results.json")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables, e.g. to docs/benchmarks.md")
    args = parser.parse_args()
    if unknown := set(args.sections) - set(NAMES):
        parser.error(f"no section {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(variable, "1")  # read when numpy is imported, by the sections below

    console = Console()
    if not console.is_terminal:
        console.width = 120
    results = {"machine": machine(), "sections": {}}
    console.print(", ".join(f"{key} {value}" for key, value in results["machine"].items()))
    missed, measured = False, []
    for name in args.sections or NAMES:
        section: Section = import_module(f"bench_{name}").SECTION
        peers = {peer: release(peer) for peer in section.peers}
        rows = []
        for row in section.rows():
            rows.append(row)
            print(f"{row.name}: {number(row.ours)} {row.unit}, times {number(row.ratio)}", file=sys.stderr, flush=True)
        missed |= any(row.met is False for row in rows)
        console.print(table(section, rows))
        for peer, found in peers.items():
            console.print(
                f"{peer} {found}" if found else f"{peer} is missing: nothing to compare with (pip install {peer})"
            )
        measured.append((section, rows))
        results["sections"][section.title] = {
            "section": name,
            "peers": peers,
            "rows": [
                {"name": r.name, "unit": r.unit, "ours": r.ours, "peer": r.peer, "ratio": r.ratio, "bar": r.bar,
                 "met": r.met, **r.extra} for r in rows
            ],
        }  # fmt: skip
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if args.markdown:
        args.markdown.write_text(markdown(results, measured), encoding="utf-8")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
