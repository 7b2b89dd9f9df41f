"""Parallel steps and barriers of a plan, and its time on several workers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from polyquant.calibration.sizes import SHARD, TOKENS, WINDOWS
from polyquant.conversion import work
from polyquant.conversion.costs import step_costs
from polyquant.conversion.engines.driver import UNITS
from polyquant.conversion.simulate import Load, Machines, Simulation, simulate
from polyquant.conversion.speed import Speed
from polyquant.conversion.steps import Plan
from polyquant.conversion.tasks import Task, shares
from polyquant.formats.steps import Step
from polyquant.types import Affine, as_matrix

__all__ = ["WORKERS", "Parallelism", "Workload", "forward_seconds", "merge_seconds"]

WORKERS = (1, 2, 4, 8, 64)
"""Numbers of workers of an estimate."""
_TOKEN = 40
"""Picoseconds per weight and token of a calibration: the product, and its share of the Hessians."""
_DENSE, _ROUTED = 8, 8
"""Most matrices of one shape in a layer without experts; experts per token in a layer with more."""
_EXIT = 0.1
"""Seconds to publish the output or a receipt, and to end the process."""
_MERGE_SECONDS, _MERGE_TASK = 0.5, 60e-6
"""A merge: its start, and the receipt of each tensor."""
_LAYER = re.compile(r"\D*\d+")


@dataclass(frozen=True, slots=True)
class Parallelism:
    """Dependencies between the steps of a plan.

    divided: steps that workers share at row blocks; whole: steps that one worker does, because their codes have one
    scale, permutation or rotation; calibrated: steps whose search needs the inputs of their layer. largest: share of
    the most expensive whole step in the work, which bounds the speed-up. barriers: a line for each.
    """

    divided: int
    whole: int
    calibrated: int
    largest: float
    barriers: tuple[str, ...]


class Workload:
    """The work of a plan in seconds of one core. measure: errors are measured."""

    def __init__(self, plan: Plan, speed: Speed, *, measure: bool = True) -> None:
        self.plan = plan
        costs = step_costs(plan.steps, calibrated=plan.text is not None, measure=measure)
        self.read = [c.read for c in costs]
        self.seconds = [speed.seconds(s, c) for s, c in zip(plan.steps, costs, strict=True)]
        self._calibration = self._calibrating(speed) if plan.text is not None else 0.0

    def loads(self, processes: int, units: int = 1) -> list[Load]:
        """The work of each of `units` shares per process; empty ones are left out. Processes of one job share the
        calibration, at most one for each shard of the text.
        """
        own = self._calibration / min(processes, -(-WINDOWS // SHARD)) / units
        return [self._load(tasks, own) for tasks in shares(self.plan, processes * units) if tasks]

    def estimate(self, start: float, workers: Sequence[int] = WORKERS) -> dict[int, float]:
        """Seconds for each number of workers, with a core each and no limit of the network. start: of a process."""
        out = {}
        for count in workers:
            end = merge_seconds(self.plan) if count > 1 else 0.0
            machines = Machines(count, 1)
            out[count] = simulate(self.loads(count), machines, scheme="parts", start=start + _EXIT, end=end).seconds
        return out

    def simulate(self, machines: Machines, start: float, *, engine: bool = False) -> Simulation:
        """Run the plan on simulated machines: in units of an engine's queue, or in one part per process."""
        processes = machines.nodes * machines.processes
        if engine:
            return simulate(self.loads(processes, UNITS), machines, scheme="units", start=start + _EXIT)
        end = merge_seconds(self.plan) if processes > 1 else 0.0
        return simulate(self.loads(processes), machines, scheme="parts", start=start + _EXIT, end=end)

    def parallelism(self) -> Parallelism:
        """Count the steps that run in parallel, and list the barriers."""
        steps, options = self.plan.steps, self.plan.options
        divided = [next(iter(work.blocks(s))) is not None for s in steps]
        calibrated = sum(map(_calibrated, steps)) if self.plan.text is not None else 0
        largest = max((t for t, d in zip(self.seconds, divided, strict=True) if not d), default=0.0)
        barriers = ["plan: every worker opens the source and makes the same plan"]
        if getattr(options, "target_bpw", None) is not None:
            barriers.append("bits: allocated in the plan, once all matrices are measured; each part repeats it")
        if calibrated:
            barriers.append(
                f"calibration: layer by layer; each layer waits for all {-(-WINDOWS // SHARD)} shards of the text, "
                "which the workers share"
            )
        barriers.append("merge: waits for all workers, and publishes the output")
        total = sum(divided)
        bound = largest / max(1e-12, sum(self.seconds))
        return Parallelism(total, len(divided) - total, calibrated, bound, tuple(barriers))

    def _load(self, tasks: Iterable[Task], calibration: float) -> Load:
        seconds, nbytes, count = 0.0, 0, 0
        for task in tasks:
            start, stop, rows = task.share or (0, 1, 1)
            part = (stop - start) / max(1, rows)
            seconds += part * self.seconds[task.index]
            nbytes += round(part * self.read[task.index]) + task.nbytes
            count += 1
        return Load(seconds + calibration, nbytes, count)

    def _calibrating(self, speed: Speed) -> float:
        """Seconds to run the model on the calibration text."""
        return forward_seconds(self.plan.steps, WINDOWS * TOKENS, speed)


def forward_seconds(steps: Sequence[Step], tokens: int, speed: Speed) -> float:
    """Seconds of one core to run the layers of a model on many tokens."""
    places = [_shape_in_layer(s) for s in steps]
    alike, products = Counter(places), 0.0
    for step, place in zip(steps, places, strict=True):
        active = 1.0 if alike[place] <= _DENSE else _ROUTED / alike[place]
        if not step.map.is_vector and _LAYER.match(step.map.target) is not None:
            products += active * step.weights
    return products * tokens * _TOKEN * speed.others / 1e12


def merge_seconds(plan: Plan) -> float:
    """Seconds of `polyquant merge`."""
    return _MERGE_SECONDS + _MERGE_TASK * len(plan.steps)


def _calibrated(step: Step) -> bool:
    return step.searches or step.target.form is Affine


def _shape_in_layer(step: Step) -> tuple[str, tuple[int, int]]:
    layer = _LAYER.match(step.map.target)
    return layer[0] if layer else step.map.target, as_matrix(step.map.shape)
