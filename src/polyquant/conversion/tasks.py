"""Tasks: steps of a plan, or rows of a step. A job in parts is divided into shares of about equal cost.

A share is a run of the plan's row blocks, so it follows from the plan and the number of parts alone. Only a step that
streams is cut within a tensor, at a row block, so that every block has the same rows as in a run on one machine.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from polyquant.conversion import work
from polyquant.conversion.costs import step_costs
from polyquant.conversion.steps import Plan
from polyquant.errors import PlanError
from polyquant.formats.steps import Step
from polyquant.storage.parts import MOST_PARTS
from polyquant.types import as_matrix

__all__ = ["Part", "Task", "cost", "parse_part", "shares", "whole"]


@dataclass(frozen=True, slots=True)
class Part:
    """Part `number` (from 1) of `count`; printed as "3/8"."""

    number: int
    count: int

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"


def parse_part(text: str) -> Part:
    """Parse "3/8". Raises PlanError."""
    match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
    part = Part(int(match[1]), int(match[2])) if match else Part(0, 0)
    if not 1 <= part.number <= part.count <= MOST_PARTS:
        raise PlanError(f"a part is I/N with I from 1 to N, at most {MOST_PARTS}", expected="e.g. 3/8", found=text)
    return part


@dataclass(frozen=True, slots=True)
class Task:
    """A step, or rows [start, stop) of one that streams. index: the step's number in the plan."""

    index: int
    step: Step
    rows: slice | None = None

    def blocks(self) -> list[slice | None]:
        """The row blocks; one None for a whole tensor."""
        if self.rows is None:
            return list(work.blocks(self.step))
        start, stop = self.rows.start, self.rows.stop
        return [slice(a, min(stop, a + self.step.block_rows)) for a in range(start, stop, self.step.block_rows)]

    @property
    def share(self) -> tuple[int, int, int] | None:
        """(start, stop, all) rows; None for a whole tensor."""
        return None if self.rows is None else (self.rows.start, self.rows.stop, as_matrix(self.step.map.shape)[0])

    @property
    def weights(self) -> int:
        """Number of weights."""
        if self.rows is None:
            return self.step.weights
        return int(self.rows.stop - self.rows.start) * as_matrix(self.step.map.shape)[1]

    @property
    def nbytes(self) -> int:
        """Bytes written."""
        start, stop, rows = self.share or (0, 1, 1)
        return self.step.nbytes * (stop - start) // rows


def whole(plan: Plan) -> tuple[Task, ...]:
    """All steps of a plan."""
    return tuple(Task(i, step) for i, step in enumerate(plan.steps))


def cost(plan: Plan, tasks: Sequence[Task]) -> int:
    """The cost of some tasks, in picoseconds on one core of the reference machine (conversion/costs.py)."""
    out = 0
    costs = step_costs((t.step for t in tasks), calibrated=plan.text is not None)
    for task, step in zip(tasks, costs, strict=True):
        start, stop, rows = task.share or (0, 1, 1)
        out += step.total * (stop - start) // max(1, rows)
    return out


def shares(plan: Plan, count: int) -> list[tuple[Task, ...]]:
    """Divide a plan into `count` shares of about equal cost; some are empty if there are more parts than blocks.

    The plan keeps them: a part needs its share for the checks, the messages and the work.
    """
    steps, parts = plan._shares.get(count, (None, []))
    if steps is not plan.steps:  # new, or copied by dataclasses.replace(plan, steps=...)
        parts = _divided(plan, count)
        plan._shares[count] = plan.steps, parts
    return list(parts)


def _divided(plan: Plan, count: int) -> list[tuple[Task, ...]]:
    costs = [c.total for c in step_costs(plan.steps, calibrated=plan.text is not None)]
    ends = list(accumulate(costs))
    total = ends[-1] if ends else 0
    cuts = [(0, 0), *(_cut(plan.steps, costs, ends, total * i // count) for i in range(1, count)), (len(costs), 0)]
    return [_between(plan.steps, a, b) for a, b in pairwise(cuts)]


def _cut(steps: Sequence[Step], costs: Sequence[int], ends: Sequence[int], at: int) -> tuple[int, int]:
    """The boundary nearest to this cost: (step, row)."""
    i = bisect_right(ends, at)
    if i == len(steps):
        return i, 0
    inside, cost = at - (ends[i] - costs[i]), max(1, costs[i])
    rows, step = as_matrix(steps[i].map.shape)[0], steps[i]
    if next(iter(work.blocks(step))) is None:
        return (i, 0) if 2 * inside < cost else (i + 1, 0)
    row = round(rows * inside / cost / step.block_rows) * step.block_rows
    return (i, row) if row < rows else (i + 1, 0)


def _between(steps: Sequence[Step], start: tuple[int, int], stop: tuple[int, int]) -> tuple[Task, ...]:
    """The tasks between two boundaries."""
    (i, row), (j, end) = start, stop
    out = []
    if i == j:
        return (Task(i, steps[i], slice(row, end)),) if row < end else ()
    if row:
        out.append(Task(i, steps[i], slice(row, as_matrix(steps[i].map.shape)[0])))
    out += [Task(n, steps[n]) for n in range(i + (row > 0), j)]
    if end:
        out.append(Task(j, steps[j], slice(0, end)))
    return tuple(out)
