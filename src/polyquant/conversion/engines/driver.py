"""The driver of an engine: hands out units of work, survives the workers that end or hang, and collects the results.

Every unit has a lease. When it expires, or its worker is lost, another worker does the unit again: all write the same
bytes at the same place. When no unit is left, idle workers repeat those that take much longer than expected, and the
first result counts. Workers that still do a unit when its result is there are busy until they end or their lease does.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from polyquant.conversion.engines.cluster import Cluster, Handle, Outcome, Unit, WorkerLostError
from polyquant.conversion.merge import sum_reports
from polyquant.conversion.report import StepReport
from polyquant.conversion.steps import Plan
from polyquant.conversion.tasks import Task, cost, shares
from polyquant.errors import CodecError, InputError, PlanError, PolyquantError, UnsupportedError
from polyquant.formats.steps import Progress
from polyquant.storage.staging import Staging
from polyquant.types import as_matrix

__all__ = [
    "ATTEMPTS",
    "FIRST_LEASE",
    "LEASE",
    "SHORTEST_LEASE",
    "SHORTEST_STRAGGLER",
    "STRAGGLER",
    "UNITS",
    "run_units",
]

ATTEMPTS = 8
"""Failed attempts at a unit before the job ends."""
UNITS = 16
"""Units per worker: enough for balance, few enough that a unit is worth its message."""
FIRST_LEASE, SHORTEST_LEASE = 1800.0, 60.0
"""Seconds of a lease before the pace is known, and the least afterwards."""
LEASE, STRAGGLER, SHORTEST_STRAGGLER = 10.0, 2.0, 3.0
"""Times the expected duration after which a lease expires, and after which an idle worker repeats a unit; after at
least 3 seconds, since the first unit of a worker opens the source.
"""
_KINDS: dict[str, type[PolyquantError]] = {k.__name__: k for k in (CodecError, InputError, PlanError, UnsupportedError)}
PATIENCE = 60.0
"""Seconds without any worker after which the job ends."""
_TICK = 0.5
"""Seconds between two checks of leases and progress."""


@dataclass(slots=True)
class _Job:
    """A unit and its state. running: handle -> (slot, when it began)."""

    unit: Unit
    tasks: tuple[Task, ...]
    cost: int
    failures: int = 0
    done: bool = False
    running: dict[Handle, tuple[int, float]] = field(default_factory=dict)


def run_units(
    plan: Plan,
    staging: Staging,
    cluster: Cluster,
    *,
    lease: float | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> list[StepReport]:
    """Run all steps of a plan that the journal does not contain. lease: seconds, by default from the measured pace.

    Returns reports in the plan's order. Raises the errors of a worker's conversion, PlanError if a unit loses worker
    after worker.
    """
    return _Driver(plan, staging, cluster, lease, on_progress).run()


class _Driver:
    def __init__(
        self,
        plan: Plan,
        staging: Staging,
        cluster: Cluster,
        lease: float | None,
        on_progress: Callable[[Progress], None] | None,
    ) -> None:
        self.plan, self.staging, self.cluster, self.lease, self.on_progress = plan, staging, cluster, lease, on_progress
        parts = shares(plan, UNITS * cluster.size)
        tasks = [tuple(t for t in part if t.step.map.target not in staging.done) for part in parts]
        self.queue = deque(_Job(tuple(map(_unit, t)), t, cost(plan, t)) for t in tasks if t)
        self.total = sum(s.weights for s in plan.steps)
        self.done_weights = sum(s.weights for s in plan.steps if s.map.target in staging.done)
        self.reports = {name: StepReport.from_json(entry) for name, entry in staging.done.items()}
        self.lines: dict[str, list[Mapping[str, Any]]] = {}
        self.jobs: dict[Handle, _Job] = {}
        self.idle = list(range(cluster.size))[::-1]
        self.pace = (0, 0.0)
        self.replaced = 0
        self.started = self.working = time.monotonic()

    def run(self) -> list[StepReport]:
        while self.queue or not all(job.done for job in self.jobs.values()):
            self._hand_out()
            ended = self.cluster.wait(list(self.jobs), _TICK)
            for handle in ended:
                self._settle(handle)
            self._expire()
            if ended:
                self._show()
        for job in self.jobs.values():
            for slot, _ in job.running.values():
                self.cluster.replace(slot)  # the files are final from here on
        return [self.reports[s.map.target] for s in self.plan.steps]

    # ---------------------------------------------------------------- units

    def _hand_out(self) -> None:
        """Give units to idle workers. Raises PlanError if there has been no worker at all for long."""
        while self.queue and (slot := self._ready_slot()) is not None:
            self._start(self.queue.popleft(), slot)
        while not self.queue and (slow := self._straggler()) is not None and (slot := self._ready_slot()) is not None:
            self._start(slow, slot)
        if self.jobs:
            self.working = time.monotonic()
        elif time.monotonic() - self.working > PATIENCE:
            raise PlanError(
                "the cluster has no free worker", found=f"none for {PATIENCE:.0f} s",
                hint="start workers; the same command resumes",
            )  # fmt: skip
        else:
            time.sleep(_TICK / 5)

    def _ready_slot(self) -> int | None:
        """Take an idle slot that has a worker; None if there is none at present."""
        slot = next((s for s in reversed(self.idle) if self.cluster.ready(s)), None)
        if slot is not None:
            self.idle.remove(slot)
        return slot

    def _start(self, job: _Job, slot: int) -> None:
        try:
            handle = self.cluster.submit(slot, job.unit)
        except WorkerLostError as problem:
            self._lost(job, slot, problem)
            return
        self.jobs[handle] = job
        job.running[handle] = slot, time.monotonic()

    def _settle(self, handle: Handle) -> None:
        """Take the result of an ended unit."""
        job = self.jobs.pop(handle)
        slot, began = job.running.pop(handle)
        try:
            outcome = self.cluster.result(handle)
        except WorkerLostError as problem:
            self._lost(job, slot, problem)
            return
        self.idle.append(slot)
        if outcome.error and outcome.transient:
            self._failed(job, outcome.error)
            return
        if outcome.error:
            raise _raised(outcome)
        if job.done:
            return
        job.done = True
        self.pace = self.pace[0] + job.cost, self.pace[1] + time.monotonic() - began
        for line in outcome.lines():
            self._record(line)

    def _lost(self, job: _Job, slot: int, problem: Exception) -> None:
        """Replace a worker and do its unit again."""
        self.cluster.replace(slot)
        self.replaced += 1
        self.idle.insert(0, slot)
        self._failed(job, f"worker lost: {problem}")

    def _failed(self, job: _Job, why: str) -> None:
        """Do a unit again, unless another worker is doing it. Raises PlanError after too many attempts."""
        if job.done:
            return
        job.failures += 1
        if job.failures >= ATTEMPTS:
            raise PlanError(
                f"{job.failures} workers failed to convert it", file=self.plan.source.path,
                tensor=job.tasks[0].step.map.origin, found=why,
                hint="the same command resumes; fewer --threads per worker or --max-memory use less memory",
            )  # fmt: skip
        if not job.running:
            self.queue.appendleft(job)

    def _expire(self) -> None:
        now = time.monotonic()
        for handle, job in list(self.jobs.items()):
            slot, began = job.running[handle]
            if now - began > self._lease(job):
                del self.jobs[handle], job.running[handle]
                self._lost(job, slot, WorkerLostError(f"no result after {now - began:.0f} s"))

    def _expected(self, job: _Job) -> float | None:
        """Seconds that a unit takes at the pace so far; None before the first is done."""
        done, seconds = self.pace
        return job.cost * seconds / done if done else None

    def _lease(self, job: _Job) -> float:
        if self.lease is not None:
            return self.lease
        expected = self._expected(job)
        return FIRST_LEASE if expected is None else max(SHORTEST_LEASE, LEASE * expected)

    def _straggler(self) -> _Job | None:
        """The unit that runs longest beyond its expected time, on one worker."""
        now, late = time.monotonic(), []
        for job in {id(j): j for j in self.jobs.values()}.values():
            expected = self._expected(job)
            if len(job.running) == 1 and not job.done and expected is not None:
                ((_, began),) = job.running.values()
                if now - began > max(SHORTEST_STRAGGLER, STRAGGLER * expected):
                    late.append((now - began - expected, id(job), job))
        return max(late)[2] if late else None

    # ---------------------------------------------------------------- results

    def _record(self, line: Mapping[str, Any]) -> None:
        """Record a tensor once all its rows are complete."""
        step = self.plan.steps[line["task"]]
        name = step.map.target
        lines = self.lines.setdefault(name, [])
        lines.append(line)
        if "rows" in line:
            rows = as_matrix(step.map.shape)[0]
            start, stop, _ = line["rows"]
            self.done_weights += step.weights * (stop - start) // max(1, rows)
            if sum(x["rows"][1] - x["rows"][0] for x in lines) < rows:
                return
        else:
            self.done_weights += step.weights
        del self.lines[name]
        lines.sort(key=lambda x: x.get("rows", (0,))[0])
        first, *others = (StepReport.from_json(x["report"]) for x in lines)
        blocks = [block for x in lines for block in x["blocks"]]
        report = sum_reports(first, others)
        self.reports[name] = replace(report, tensor=name, shape=step.map.shape)  # the plan's objects, not copies
        self.staging.record(name, report.to_json(), blocks, task=line["task"])

    def _show(self) -> None:
        if self.on_progress is not None:
            names = [j.tasks[0].step.map.target for j in self.jobs.values()]
            replaced = f", {self.replaced} replaced" if self.replaced else ""
            text = f"{len(names)} of {self.cluster.size} workers{replaced}: {', '.join(names[:2])}"
            self.on_progress(Progress(self.done_weights, self.total, text, time.monotonic() - self.started))


def _unit(task: Task) -> tuple[int, int, int]:
    return (task.index, 0, -1) if task.rows is None else (task.index, task.rows.start, task.rows.stop)


def _raised(outcome: Outcome) -> Exception:
    """The error of a worker as one of this process."""
    if outcome.kind == "OSError":
        return OSError(outcome.error)
    kind = _KINDS.get(outcome.kind, InputError)
    return kind(outcome.error)
