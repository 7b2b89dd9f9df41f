"""polyquant plan"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from polyquant.cli.console import as_json, size, table
from polyquant.cli.conversion_options import options_of_conversions
from polyquant.cli.grouped import GroupedCommand, GroupedOption
from polyquant.cli.source_type import SOURCE
from polyquant.cli.terminal import say, say_some

if TYPE_CHECKING:
    from polyquant.conversion.estimate import Parallelism
    from polyquant.conversion.simulate import Machines, Simulation

_simulated = partial(click.option, cls=GroupedOption, group="Simulation", show_default=True)
_TIMES = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))


@click.command(
    cls=GroupedCommand,
    epilog="""\b
Examples:
  polyquant plan hf-folder/ model.gguf --recipe q4_k_m
  polyquant plan hf-folder/ --to trellis-v3 --bits 3
  polyquant plan hf-folder/ model.gguf --simulate 64,32,1.25,2000
  polyquant plan hf/ out.gguf --engine ray --simulate 64,32,1.25,2000
  polyquant plan hf-folder/ model.gguf --simulate 1,8,0,0 --workers 4""",
)
@click.argument("src", type=SOURCE)
@click.argument("dst", type=SOURCE, required=False)
@_simulated(
    "--simulate",
    metavar="NODES,CORES,GBPS,MTBF",
    help="Simulate machines: their number, cores of each, gigabytes per second between each and the storage (0: no "
    "limit), mean hours between failures of each (0: none). --workers and --threads are those of each machine (1 "
    "process with all cores); --engine simulates its queue of units, otherwise --part I/N and merge.",
)
@_simulated(
    "--storage", type=click.FloatRange(0), default=0.0, metavar="GBPS", help="Of all machines together; 0: no limit."
)
@_simulated("--restart", type=click.FloatRange(0), default=120.0, metavar="SECONDS", help="From a failure to new work.")
@_simulated("--spread", type=click.FloatRange(0, 0.5), default=0.05, metavar="X", help="Deviation of their speeds.")
@_simulated("--price", type=click.FloatRange(0), default=0.0, metavar="X", help="Price of a machine for an hour.")
@_simulated("--seed", type=int, default=0, help="Of failures and speeds.")
@options_of_conversions
def plan(
    src: str, dst: str | None, simulate: str | None, storage: float, restart: float, spread: float, price: float,
    seed: int, to: str | None, rules: tuple[str, ...], threads: int | None, workers: int | None, engine: str | None,
    no_measure: bool, part: str | None, style: str, **options: Any,
) -> None:  # fmt: skip
    """Print the plan of a conversion, what of it can run in parallel, and the time on several workers. Nothing is
    written.

    Takes all options of `convert`; those of a run, such as --overwrite, have no effect. Without DST, --to or the other
    options select the target. The speed of this machine is measured for a fraction of a second.
    """
    import time

    from polyquant.cli.conversion import plan_json, planned, print_plan, print_share
    from polyquant.conversion.estimate import Workload
    from polyquant.conversion.simulate import parse_machines
    from polyquant.conversion.speed import measure_speed
    from polyquant.conversion.tasks import parse_part

    machines = None
    if simulate is not None:
        machines = replace(
            parse_machines(simulate), processes=workers or 1, threads=threads or 0, storage=storage,
            restart=restart, spread=spread, price=price, seed=seed,
        )  # fmt: skip
    share = parse_part(part) if part is not None else None
    of_plan = {key: value for key, value in options.items() if key not in _OF_A_RUN}
    made = planned(src, Path(dst or ""), to, rules=rules, **of_plan)
    start = time.process_time()  # import, open and plan, which every process repeats
    workload = Workload(made, measure_speed(made.steps), measure=not no_measure)
    parallel, estimate = workload.parallelism(), workload.estimate(start)
    result = workload.simulate(machines, start, engine=engine is not None) if machines is not None else None
    if style == "json":
        as_json({
            **plan_json(made),
            "start": start,
            "parallel": asdict(parallel),
            "estimate": [{"workers": n, "seconds": seconds} for n, seconds in estimate.items()],
            **({"simulation": asdict(result)} if result is not None else {}),
        })  # fmt: skip
        return
    print_plan(made, steps=False)
    if share is not None:
        print_share(made, share)
    _print_parallelism(parallel)
    _print_estimate(estimate)
    if machines is not None and result is not None:
        _print_simulation(machines, result, "units of a queue" if engine is not None else "fixed parts")


_OF_A_RUN = ("dry_run", "overwrite", "resume", "max_memory", "address", "lease")


def _print_parallelism(found: Parallelism) -> None:
    """Print the parallel steps and the barriers."""
    whole = f"; {found.whole:,} whole, the largest {100 * found.largest:.1f} % of the work" if found.whole else ""
    say(f"parallel: {found.divided:,} tensors can be divided at row blocks{whole}")
    if found.calibrated:
        say(f"in order: {found.calibrated:,} tensors are calibrated, layer by layer")
    say_some(found.barriers, "barrier: ")


def _print_estimate(estimate: Mapping[int, float]) -> None:
    """Print the time of each number of workers."""
    say("estimate at the speed of this machine, each worker with one core, without a limit of network and disk:")
    t = table(">workers", ">time", ">speed-up")
    for workers, seconds in estimate.items():
        t.add_row(str(workers), duration(seconds), f"{next(iter(estimate.values())) / seconds:.1f}")
    t.show()


def _print_simulation(machines: Machines, result: Simulation, scheme: str) -> None:
    """Print the result of a simulation."""
    plural = "s" if machines.nodes > 1 else ""
    say(f"simulation: {machines.nodes:,} machine{plural} with {machines.cores} cores, {scheme}")
    rows = [
        ("time", duration(result.seconds)),
        ("traffic", size(result.traffic)),
        ("machine-hours", f"{result.machine_hours:,.1f}"),
        *([("cost", f"{result.cost:,.2f}")] if machines.price else []),
        ("efficiency", f"{100 * result.efficiency:.1f} % of one machine's"),
        *([("failures", f"{result.failures:,}; {result.repeated:,} units repeated")] if machines.mtbf else []),
        ("lost", f"{100 * result.lost:.2f} % of the processor time"),
    ]
    for name, value in rows:
        say(f"  {name:14} {value}")


def duration(seconds: float) -> str:
    """A duration in the largest fitting unit: "3.2 h"."""
    unit, word = next(((n, word) for n, word in _TIMES if seconds >= 2 * n), _TIMES[-1])
    return f"{seconds / unit:,.1f} {word}"
