"""Simulate a conversion on many machines: a discrete-event model of cores, network, failures and the units of work.

Two schemes: "parts" (--part I/N: one fixed share per process, and merge) and "units" (an engine: the driver's queue
with leases and speculation, engines/driver.py). The model, for each process:

    start-up (one core: import, open, plan) -> its units: arithmetic and transfer, which overlap -> end

Processes of a machine share its cores. Transfers of all processes share the machine's link and, if it is limited, the
storage. A machine fails at exponentially distributed times; it loses the work in progress and comes back after
`restart` seconds. Some failures are silent: only the lease shows them. The job ends with the last unit and the merge,
which are its barriers. Everything is drawn from one seeded generator, so the same input gives the same result.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from typing import Any, Literal

from polyquant.conversion.engines.driver import (
    ATTEMPTS,
    FIRST_LEASE,
    LEASE,
    SHORTEST_LEASE,
    SHORTEST_STRAGGLER,
    STRAGGLER,
)
from polyquant.errors import PlanError

__all__ = ["Load", "Machines", "Simulation", "parse_machines", "simulate"]

Scheme = Literal["parts", "units"]

_MOST_LOSSES = 10_000
"""Losses of all units after which a job counts as endless."""
_LEAST = 1e-9
"""Seconds on one core of the shortest computation."""


@dataclass(frozen=True, slots=True)
class Machines:
    """Equal machines.

    cores: of each; gbps: gigabytes per second between a machine and the storage, 0: no limit; mtbf: mean hours between
    failures of a machine, 0: never. processes: of each machine; threads: of each process. storage: gigabytes per second
    of all machines together, 0: no limit. restart: seconds from a failure until the machine works again. silent: share
    of the failures that only a lease shows. spread: relative standard deviation of the machines' speeds.
    price: of a machine-hour.
    """

    nodes: int
    cores: int
    gbps: float = 0.0
    mtbf: float = 0.0
    processes: int = 1
    threads: int = 0
    storage: float = 0.0
    restart: float = 120.0
    silent: float = 0.1
    spread: float = 0.0
    price: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Load:
    """A unit of work. seconds: on one core; nbytes: read and written; tasks: after each of them a part can resume."""

    seconds: float
    nbytes: int = 0
    tasks: int = 1


@dataclass(frozen=True, slots=True)
class Simulation:
    """The result. seconds: from the start to the published output; traffic: bytes moved, with repetitions;
    machine_hours and cost: of all machines for that time; efficiency: time of one machine without failures, divided by
    machines and time; lost: share of the processor time whose results were lost; failures: of machines;
    repeated: units done again or twice.
    """

    seconds: float
    traffic: int
    machine_hours: float
    cost: float
    efficiency: float
    lost: float
    failures: int
    repeated: int


def parse_machines(text: str) -> Machines:
    """Parse "NODES,CORES,GBPS,MTBF". Raises PlanError."""
    words = text.split(",")
    try:
        nodes, cores, gbps, mtbf = int(words[0]), int(words[1]), float(words[2]), float(words[3])
        valid = len(words) == 4 and 1 <= nodes <= 100_000 and 1 <= cores <= 1024
        if valid and all(math.isfinite(x) and x >= 0 for x in (gbps, mtbf)):
            return Machines(nodes, cores, gbps, mtbf)
    except (ValueError, IndexError):
        pass
    raise PlanError(
        "--simulate needs NODES,CORES,GBPS,MTBF", expected="e.g. 64,32,1.25,1000 (gigabytes per second; hours)",
        found=text, hint="0 for GBPS: no limit; 0 for MTBF: no failures",
    )  # fmt: skip


def simulate(
    loads: Sequence[Load], machines: Machines, *, scheme: Scheme = "units", start: float = 0.0, end: float = 0.0
) -> Simulation:
    """Run the units on the machines. scheme "parts": unit i belongs to process i modulo the number of processes.

    start: seconds of start-up of each process on one core; end: seconds of the merge. Raises PlanError if the failures
    leave no chance to finish.
    """
    run = _Run(loads, machines, scheme, start)
    seconds = run.run() + end
    alone = seconds
    if machines.nodes > 1 or machines.mtbf:
        alone = _one_machine(loads, machines, scheme, start) + end
    hours = machines.nodes * seconds / 3600
    return Simulation(
        seconds,
        round(run.moved),
        hours,
        hours * machines.price,
        alone / (machines.nodes * seconds) if seconds else 1.0,
        run.lost / max(_LEAST, run.spent + run.lost),
        run.failures,
        run.repeated,
    )


def _one_machine(loads: Sequence[Load], machines: Machines, scheme: Scheme, start: float) -> float:
    """Seconds of one machine without failures."""
    one = replace(machines, nodes=1, mtbf=0.0, spread=0.0)
    return _Run(loads, one, scheme, start).run()


@dataclass(slots=True, eq=False)
class _Job:
    """A unit of work. left: seconds on one core that are not done."""

    load: Load
    left: float
    done: bool = False
    losses: int = 0
    runners: list[_Process] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Process:
    """A process. cpu: seconds on one core left of its start-up or unit, of `given`; moving: its transfer has not ended.

    version, serial: numbers of its present computation and unit, which invalidate earlier events.
    """

    number: int
    machine: _Machine
    job: _Job | None = None
    ready: bool = False
    cpu: float = 0.0
    given: float = 0.0
    moving: bool = False
    began: float = 0.0
    version: int = 0
    serial: int = 0


@dataclass(slots=True, eq=False)
class _Machine:
    """A machine. at: the time to which its computations have been advanced; stuck: failed silently."""

    speed: float
    processes: list[_Process] = field(default_factory=list)
    at: float = 0.0
    up: bool = True
    stuck: bool = False


class _Run:
    """The state of one simulation. An event is (time, number, method, process or machine, version)."""

    def __init__(self, loads: Sequence[Load], machines: Machines, scheme: Scheme, start: float) -> None:
        self.given, self.parts, self.start = machines, scheme == "parts", start
        self.random = random.Random(machines.seed)  # noqa: S311 - reproducible, not secret
        self.threads = machines.threads or max(1, machines.cores // machines.processes)
        self.events: list[tuple[float, int, Callable[[Any, int], None], Any, int]] = []
        self.now, self.count = 0.0, 0
        self.machines = [_Machine(max(0.2, self.random.gauss(1, machines.spread))) for _ in range(machines.nodes)]
        self.processes: list[_Process] = []
        for machine in self.machines:
            machine.processes = [_Process(len(self.processes) + i, machine) for i in range(machines.processes)]
            self.processes += machine.processes
        jobs = [_Job(load, max(load.seconds, _LEAST)) for load in loads]
        queues = len(self.processes) if self.parts else 1
        self.queues = [deque(jobs[i::queues]) for i in range(queues)]
        self.open, self.running = len(jobs), set[_Job]()
        self.link = machines.gbps * 1e9 / machines.processes or math.inf
        self.storage = machines.storage * 1e9 or math.inf
        self.carried, self.moving = 0.0, 0  # bytes of each transfer since the start; number of transfers
        self.transfers: list[tuple[float, int, _Process, int]] = []
        self.idle: dict[_Process, None] = {}
        self.looking = False
        self.pace = (0.0, 0.0)
        self.spent = self.lost = self.moved = 0.0
        self.failures = self.repeated = self.losses = 0

    # ---------------------------------------------------------------- events

    def run(self) -> float:
        """Return the time at which the last unit is done. Raises PlanError if it never is."""
        for machine in self.machines:
            self._fail_later(machine)
            self._boot(machine, 0)
        while self.open:
            arrival = self._next_arrival()
            if self.events and self.events[0][0] <= arrival:
                when, _, happen, what, version = heappop(self.events)
                self._pass(when)
                happen(what, version)
            elif self.transfers:
                self._pass(arrival)
                process = heappop(self.transfers)[2]
                process.moving = False
                self.moving -= 1
                self._finish(process)
            else:
                raise PlanError("the simulated job does not finish: all processes wait")
        return self.now

    def _at(self, when: float, happen: Callable[[Any, int], None], what: Any, version: int = 0) -> None:
        self.count += 1
        heappush(self.events, (when, self.count, happen, what, version))

    def _pass(self, when: float) -> None:
        """Advance the clock and all transfers."""
        if self.moving:
            moved = (when - self.now) * self._rate()
            self.carried += moved
            self.moved += moved * self.moving
        self.now = when

    def _rate(self) -> float:
        """Bytes per second of each transfer."""
        return min(self.link, self.storage / self.moving)

    def _next_arrival(self) -> float:
        """The time at which the next transfer ends, at the present rate."""
        while self.transfers:
            until, _, process, serial = self.transfers[0]
            if process.serial == serial and process.moving:
                return self.now + max(0.0, until - self.carried) / self._rate()
            heappop(self.transfers)
        return math.inf

    # ---------------------------------------------------------------- cores of a machine

    def _cores(self, process: _Process, share: float) -> float:
        return min(share, self.threads if process.ready else 1)

    def _share(self, machine: _Machine) -> float:
        """Cores for each process that computes."""
        return self.given.cores / max(1, sum(p.cpu > 0 for p in machine.processes))

    def _advance(self, machine: _Machine) -> None:
        """Charge the time since the last change to the computations of a machine."""
        passed = self.now - machine.at
        if passed > 0 and machine.up and not machine.stuck:
            share = self._share(machine)
            for process in machine.processes:
                if process.cpu > 0:  # only its own event ends a computation
                    done = passed * self._cores(process, share) * machine.speed
                    process.cpu = max(_LEAST, process.cpu - done)
        machine.at = self.now

    def _predict(self, machine: _Machine) -> None:
        """Predict the end of each computation of a machine, after a change."""
        share = self._share(machine)
        for process in machine.processes:
            process.version += 1
            if process.cpu > 0:
                rate = self._cores(process, share) * machine.speed
                self._at(self.now + process.cpu / rate, self._computed, process, process.version)

    def _boot(self, machine: _Machine, _: int) -> None:
        """Start the processes of a machine."""
        machine.up, machine.stuck, machine.at = True, False, self.now
        for process in machine.processes:
            process.ready, process.cpu = False, max(self.start, _LEAST)
        self._predict(machine)

    def _computed(self, process: _Process, version: int) -> None:
        """The end of a start-up, or of the arithmetic of a unit."""
        if version != process.version:
            return
        self._advance(process.machine)
        process.cpu = 0.0
        if process.ready:
            self._finish(process)
        else:
            process.ready = True
            self._take(process)
        self._predict(process.machine)

    # ---------------------------------------------------------------- units

    def _take(self, process: _Process) -> None:
        """Start the next unit of the queue."""
        queue = self.queues[process.number if self.parts else 0]
        if queue:
            self._begin(process, queue.popleft())
        else:
            self.idle[process] = None
            self._look()

    def _begin(self, process: _Process, job: _Job) -> None:
        self.idle.pop(process, None)
        if job.losses or job.runners:
            self.repeated += 1
        job.runners.append(process)
        self.running.add(job)
        self._advance(process.machine)
        process.job, process.began, process.serial = job, self.now, process.serial + 1
        process.cpu = process.given = job.left
        nbytes = job.load.nbytes * job.left / max(job.load.seconds, _LEAST)
        if nbytes and min(self.link, self.storage) < math.inf:
            process.moving = True
            self.moving += 1
            self.count += 1
            heappush(self.transfers, (self.carried + nbytes, self.count, process, process.serial))
        else:
            self.moved += nbytes
        self._predict(process.machine)

    def _finish(self, process: _Process) -> None:
        """The end of a unit, if both its arithmetic and its transfer have ended."""
        job = process.job
        if job is None or process.cpu > 0 or process.moving:
            return
        job.done, self.open = True, self.open - 1
        self.running.discard(job)
        self.spent += process.given
        self.pace = self.pace[0] + job.load.seconds, self.pace[1] + self.now - process.began
        for other in list(job.runners):
            self._leave(other)
            if other is not process:
                self.lost += other.given - other.cpu
                other.cpu = 0.0
                self._predict(other.machine)
            if other.machine.up and not other.machine.stuck:
                self._take(other)

    def _leave(self, process: _Process) -> None:
        """Detach a process from its unit."""
        assert process.job is not None
        self._advance(process.machine)
        process.job.runners.remove(process)
        process.job = None
        process.serial += 1
        if process.moving:
            process.moving = False
            self.moving -= 1

    def _expected(self, job: _Job) -> float:
        """Seconds of a unit at the pace so far."""
        cost, seconds = self.pace
        return job.load.seconds * seconds / cost if cost else math.inf

    def _look(self) -> None:
        """Plan the moment at which idle processes repeat a unit that takes too long."""
        if self.parts or self.looking:
            return
        alone = [job for job in self.running if len(job.runners) == 1]
        late = min((job.runners[0].began + self._patience(job) for job in alone), default=math.inf)
        if late < math.inf:
            self.looking = True
            self._at(max(self.now + 0.5, late), self._speculate, None)

    def _patience(self, job: _Job) -> float:
        """Seconds after which another process repeats a unit."""
        return max(SHORTEST_STRAGGLER, STRAGGLER * self._expected(job))

    def _speculate(self, _: Any, __: int) -> None:
        self.looking = False
        late = [
            (self.now - job.runners[0].began - self._expected(job), -job.runners[0].number, job)
            for job in self.running
            if len(job.runners) == 1 and self.now - job.runners[0].began >= self._patience(job)
        ]
        for process, (_, _, job) in zip(list(self.idle), sorted(late, key=lambda x: x[:2], reverse=True), strict=False):
            self._begin(process, job)
        if self.idle:
            self._look()

    # ---------------------------------------------------------------- failures

    def _fail_later(self, machine: _Machine) -> None:
        if self.given.mtbf:
            self._at(self.now + self.random.expovariate(1 / (3600 * self.given.mtbf)), self._fail, machine)

    def _fail(self, machine: _Machine, _: int) -> None:
        """A machine fails: its processes lose their units, at once or when the lease of one expires."""
        self._fail_later(machine)
        silent = self.random.random() < self.given.silent
        if not machine.up or machine.stuck:
            return
        self.failures += 1
        self._advance(machine)
        busy = [p for p in machine.processes if p.job is not None]
        if silent and busy and not self.parts:
            machine.stuck = True
            for process in machine.processes:
                process.version += 1
                self.idle.pop(process, None)
            lease = min(p.began + max(SHORTEST_LEASE, LEASE * self._expected(p.job)) for p in busy if p.job)
            self._at(max(self.now, min(lease, self.now + FIRST_LEASE)), self._down, machine)
        else:
            self._down(machine, 0)

    def _down(self, machine: _Machine, _: int) -> None:
        """Take the units of a failed machine back, and restart it."""
        machine.up = False
        for process in machine.processes:
            process.version += 1
            self.idle.pop(process, None)
            if process.job is not None:
                self._lose(process, process.job)
            process.cpu = 0.0
        self._at(self.now + self.given.restart, self._boot, machine)

    def _lose(self, process: _Process, job: _Job) -> None:
        self._leave(process)
        done = process.given - process.cpu
        kept = process.given * math.floor(done / process.given * job.load.tasks) / job.load.tasks if self.parts else 0.0
        job.left, self.spent, self.lost = job.left - kept, self.spent + kept, self.lost + done - kept
        job.losses, self.losses = job.losses + 1, self.losses + 1
        if (job.losses >= ATTEMPTS and not self.parts) or self.losses > _MOST_LOSSES:
            raise PlanError(
                "the simulated job ends: machines fail more often than they finish a unit",
                expected=f"units much shorter than {self.given.mtbf:g} hours",
                found=f"{job.load.seconds / self.threads / 3600:.2g} hours", hint="more units, or fewer machines",
            )  # fmt: skip
        if not job.runners:
            self.running.discard(job)
            self.queues[process.number if self.parts else 0].appendleft(job)
            for waiting in list(self.idle)[:1]:
                if not self.parts:
                    self._take(waiting)
