"""Write the tables of docs/scale.md: simulated times of large models on 1 to 512 machines.

python bench/scale_tables.py      plans headers with the real shapes (large_models.py); a minute and 100 MB of disk

The costs are those of the reference machine (conversion/cost_table.py), so that the tables are reproducible.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import polyquant as pq
from large_models import MODELS, write_model
from polyquant.cli.plan_command import duration
from polyquant.conversion.estimate import Workload
from polyquant.conversion.simulate import Machines
from polyquant.conversion.speed import REFERENCE
from polyquant.tables import size

PAGE = Path(__file__).resolve().parent.parent / "docs" / "scale.md"
MACHINE = Machines(1, 32, gbps=1.25, mtbf=1000.0, storage=100.0, restart=300.0, spread=0.05)
NODES = (1, 8, 64, 512)
TITLES = {
    "llama-405b": "Llama 3.1 405B",
    "deepseek-v3": "DeepSeek-V3 671B",
    "kimi-k2": "1T mixture (Kimi-K2)",
    "moe-1.6t": "1.6T mixture (600 experts)",
}
JOBS = {"q4_k_m": ("gguf", {"recipe": "q4_k_m"}), "trellis, 3 bits": ("trellis-v3", {"bits": 3})}
SEEDS = 5


def lines(place: Path) -> Iterator[str]:
    """Yield the rows of the tables."""
    yield (
        "| model | tensors | to | read and written | core-hours | "
        + " | ".join(f"{n} machine{'s' * (n > 1)}" for n in NODES)
        + " |"
    )
    yield "|---|---:|---|---:|---:|" + "---:|" * len(NODES)
    for name in MODELS:
        folder = place / name
        tensors = write_model(name, folder)
        for job, (to, options) in JOBS.items():
            begun = time.process_time()
            plan = pq.plan(folder, to, **options)
            start = time.process_time() - begun
            work = Workload(plan, REFERENCE)
            moved = sum(work.read) + plan.nbytes
            cells = [cell(work, nodes, start) for nodes in NODES]
            hours = sum(work.seconds) / 3600
            yield f"| {TITLES[name]} | {tensors:,} | {job} | {size(moved)} | {hours:,.0f} | " + " | ".join(cells) + " |"
            print(name, job, cells, flush=True)


def cell(work: Workload, nodes: int, start: float) -> str:
    """Return the mean time in units of a queue, its efficiency, and the mean time in fixed parts."""

    def mean(engine: bool) -> tuple[float, float]:
        machines = replace(MACHINE, nodes=nodes, spread=MACHINE.spread if nodes > 1 else 0.0)
        runs = [work.simulate(replace(machines, seed=s), start, engine=engine) for s in range(SEEDS)]
        return sum(r.seconds for r in runs) / SEEDS, sum(r.efficiency for r in runs) / SEEDS

    (units, efficiency), (parts, _) = mean(engine=True), mean(engine=False)
    return f"{duration(units)} ({100 * efficiency:.0f} %); {duration(parts)}"


def main() -> None:
    """Replace the tables between the markers of the page."""
    with tempfile.TemporaryDirectory() as place:
        made = "\n".join(lines(Path(place)))
    text = PAGE.read_text(encoding="utf-8")
    marked = re.compile(r"(<!-- tables: bench/scale_tables.py -->\n).*?(\n<!-- end -->)", re.S)
    PAGE.write_text(marked.sub(lambda m: m[1] + made + m[2], text), encoding="utf-8")


if __name__ == "__main__":
    main()
