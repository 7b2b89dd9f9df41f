"""One worker of an engine: makes the driver's plan again and runs units of it, writing into the driver's files."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyquant.calibration.shared import SharedCalibration
from polyquant.conversion.engines.cluster import Assignment, Outcome, Unit
from polyquant.conversion.execute import kernel_threads, memory_limit
from polyquant.conversion.run import Run
from polyquant.conversion.steps import Plan, with_name
from polyquant.conversion.tasks import Task
from polyquant.errors import PlanError, PolyquantError
from polyquant.storage.source import refuse_changed
from polyquant.storage.staging import ForeignFileError, Staging
from polyquant.storage.work_folder import CALIBRATION

__all__ = ["UnitRunner"]


_TRANSIENT = {errno.EIO, errno.EAGAIN, errno.EINTR, errno.ESTALE, errno.ETIMEDOUT, errno.ENETDOWN}
"""Errors of shared storage."""
_PAUSES = (0.1, 0.3, 1.0, 3.0)
"""Seconds before the source is opened again."""


class _Lines:
    """A journal in memory: the driver appends its lines to the one on disk."""

    def __init__(self, files: Path) -> None:
        self.files = files
        self.lines: list[dict[str, Any]] = []

    def append(self, **values: Any) -> None:
        self.lines.append(values)


class UnitRunner:
    """Runs units of one job. Everything is opened at the first unit, so that errors reach the driver as outcomes."""

    def __init__(self, assignment: Assignment) -> None:
        self._assignment = assignment
        self._plan: Plan | None = None
        self._limit: int | None = None
        self._planning = False
        self._calibration = SharedCalibration(Path(assignment.files).with_name(CALIBRATION))

    def run(self, unit: Unit) -> Outcome:
        """Run the tasks of a unit; their bytes are on disk when it returns."""
        try:
            lines = self._run(unit)
        except PolyquantError as problem:
            return Outcome(error=str(problem), kind=type(problem).__name__, transient=self._transient(problem))
        except OSError as problem:
            where, transient = f"{problem.filename}: " if problem.filename else "", self._transient(problem)
            return Outcome(error=f"{where}{problem.strerror or problem}", kind="OSError", transient=transient)
        return Outcome.of(lines)

    def _transient(self, problem: BaseException) -> bool:
        """True for errors that another attempt may not meet: of shared storage, or of opening what the driver could
        open, where findings name no system call.
        """
        code = _errno(problem)
        return code in _TRANSIENT or (code == 0 and self._planning)

    def _run(self, unit: Unit) -> list[dict[str, Any]]:
        plan = self._opened()
        tasks = [Task(i, plan.steps[i], None if stop < 0 else slice(start, stop)) for i, start, stop in unit]
        journal, threads = _Lines(Path(self._assignment.files)), self._assignment.threads
        staging = _staging(journal, plan)
        try:
            with kernel_threads(threads):
                run = Run(plan, tasks, threads, self._assignment.measure, None, self._limit, self._calibration)
                run.all_tasks(staging)
            refuse_changed(plan.source.opened)
            staging.flush()
        finally:
            staging.close()
        return journal.lines

    def _opened(self) -> Plan:
        """The driver's plan. Raises PlanError if this machine sees another source or not the driver's files."""
        if self._plan is not None:
            return self._plan
        given = self._assignment
        if Path(given.folder).is_dir():
            os.chdir(given.folder)
        self._planning = True
        made = with_name(_planned(given.request), Path(given.target))
        self._planning = False
        if made.identity != given.identity:
            raise PlanError("a worker makes another plan: its source or its version of polyquant differs",
                            file=made.source.path, expected=given.identity[:16], found=made.identity[:16])  # fmt: skip
        if not Path(given.files).is_dir():
            raise PlanError("a worker does not see the folder of the target", file=Path(given.files),
                            hint="use a folder that all workers share, or --part and merge --from")  # fmt: skip
        self._limit = memory_limit(made, given.max_memory)
        self._plan = made
        return made


def _planned(request: Mapping[str, Any]) -> Plan:
    """Make the driver's plan. The driver could, so an error is tried again: storage may fail for a moment."""
    from polyquant.conversion.convert import plan

    for pause in _PAUSES:
        try:
            return plan(**request)
        except (PolyquantError, OSError):
            time.sleep(pause)
    return plan(**request)


def _errno(problem: BaseException | None) -> int:
    """The errno of the system call that caused an error; 0 if there is none."""
    while problem is not None:
        if isinstance(problem, OSError):
            return problem.errno or 0
        problem = problem.__cause__ or problem.__context__
    return 0


def _staging(journal: _Lines, plan: Plan) -> Staging:
    try:
        return Staging(journal, plan.layout)
    except ForeignFileError as problem:
        raise PlanError("another program changed the unfinished output", file=journal.files, found=problem) from None
