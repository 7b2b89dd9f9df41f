"""Run tasks: stream row blocks from the source's files to their slots, on several threads, measuring errors.

Only the row blocks in progress are in memory, never a whole model. A step whose codec cannot be split by rows (I2_S,
TL: one scale or one permutation per tensor) holds the codes of that tensor, one byte per weight. Trellis steps hold
the floats of a whole tensor and their kernels use all cores, so only one runs at a time, in parallel with other steps.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from polyquant.conversion import work
from polyquant.conversion.memory import job_bytes
from polyquant.conversion.read_ahead import reading_ahead
from polyquant.conversion.report import StepReport
from polyquant.conversion.steps import Plan
from polyquant.conversion.tasks import Task
from polyquant.errors import CodecError, InputError
from polyquant.formats.protocol import Context
from polyquant.formats.steps import Piece, Progress, Step
from polyquant.ops.metrics import ErrorSums
from polyquant.storage.phases import phase, waited
from polyquant.storage.staging import Sink
from polyquant.types import Affine, as_matrix

if TYPE_CHECKING:
    from polyquant.calibration.shared import SharedCalibration

__all__ = ["Run"]

_Result: TypeAlias = tuple[ErrorSums | None, str]

_CHEAP = 64
"""Approximate number of weights copied in the time of one trellis search."""


def _calibration_stages(*text: Any, **size: Any) -> Any:
    from polyquant.calibration.stages import calibration_stages  # here, for conversions without calibration

    return calibration_stages(*text, **size)


class Run:
    """The mutable state of one execution: a bounded window of jobs on a thread pool."""

    def __init__(
        self,
        plan: Plan,
        tasks: Sequence[Task],
        threads: int,
        measure: bool,
        on_progress: Callable[[Progress], None] | None,
        limit: int | None = None,
        calibration: SharedCalibration | None = None,
    ) -> None:
        self.limit = limit
        self.plan, self.tasks, self.threads = plan, tasks, threads
        self.measure, self.on_progress = measure, on_progress
        self.searches = any(t.step.searches for t in tasks)
        self.total = sum(self._work(t.step, t.weights) for t in tasks)
        learning = [t.step for t in tasks if t.step.searches or t.step.target.form is Affine]
        self.calibrating = sum(s.weights for s in learning) if plan.text is not None else 0
        self.calibrated = 0.0
        self.done_weights = 0
        self.started = time.monotonic()
        self.busy: list[float] = []  # seconds of each job
        self.stop = threading.Event()
        self.worker = plan.target.worker(
            Context(
                plan.source,
                plan.steps,
                plan.options,
                plan.importance,
                partial(work.floats, plan.source),
                self._calibrated,
                partial(_calibration_stages if calibration is None else calibration.stages, plan.source.path),
                calibration is not None,
            )
        )

    def _work(self, step: Step, weights: int) -> int:
        """The progress units of some weights of a step, weighted by duration so that the remaining time can be
        estimated.
        """
        return weights if step.searches or not self.searches else weights // _CHEAP

    def all_tasks(self, staging: Sink) -> list[StepReport]:
        """Run the tasks that the journal does not contain. Returns reports in the plan's order."""
        reports = {name: StepReport.from_json(entry) for name, entry in staging.done.items()}
        tasks = {t.step.map.target: t for t in self.tasks}
        self.done_weights = sum(self._work(t.step, t.weights) for name, t in tasks.items() if name in reports)
        open_blocks: dict[str, int] = {}
        sums: dict[str, list[_Result]] = {}
        pending: dict[Future[_Result], tuple[Step, int, int]] = {}

        def settle(done: set[Future[_Result]]) -> None:
            for future in [
                f for f in pending if f in done
            ]:  # in order of submission: of two errors the first is reported
                step, weights, _ = pending.pop(future)
                name = step.map.target
                sums[name].append(future.result())
                self._tell(name, self._work(step, weights))
                open_blocks[name] -= 1
                if open_blocks[name] == 0:
                    task = tasks[name]
                    reports[name] = self._step_report(task, sums.pop(name))
                    rows = {} if task.share is None else {"rows": task.share}
                    staging.finish(name, reports[name].to_json(), task=task.index, **rows)

        with phase("order" if self.plan.text is None else "calibrate"):
            ordered = self._ordered([t.step for name, t in tasks.items() if name not in reports])
        began = time.monotonic()
        ahead = reading_ahead(self.plan.source, ((s, tasks[s.map.target].blocks()) for s in ordered), self.limit)
        with ahead, ThreadPoolExecutor(self.threads) as pool, ThreadPoolExecutor(1) as lane:
            try:
                for step in ordered:
                    row_blocks = tasks[step.map.target].blocks()
                    open_blocks[step.map.target], sums[step.map.target] = len(row_blocks), []
                    need = self._job_bytes(step)
                    for rows in row_blocks:
                        while len(pending) >= 2 * self.threads or not self._fits(need, pending.values()):
                            settle(wait(pending, return_when=FIRST_COMPLETED).done)
                        job = (lane if step.alone else pool).submit(self._job, step, rows, staging)
                        pending[job] = (
                            step,
                            (rows.stop - rows.start) * as_matrix(step.map.shape)[1] if rows else step.weights,
                            need,
                        )
                while pending:
                    settle(wait(pending, return_when=FIRST_COMPLETED).done)
            finally:  # after an error or an interrupt: running jobs stop early, others never start
                self.stop.set()
                for future in pending:
                    future.cancel()
        waited(self.threads, time.monotonic() - began, sum(self.busy))
        return [reports[name] for name in tasks]

    def _job_bytes(self, step: Step) -> int:
        return 0 if self.limit is None else job_bytes(step, calibrated=self.plan.text is not None)

    def _fits(self, need: int, pending: Collection[tuple[Step, int, int]]) -> bool:
        """True if one more job stays within the memory limit. A job alone always does: `memory_limit` checked it."""
        return self.limit is None or not pending or need + sum(job[2] for job in pending) <= self.limit

    def _ordered(self, steps: list[Step]) -> list[Step]:
        """The steps in execution order; calibration runs here."""
        return steps if self.worker is None else self.worker.order(steps)

    def _calibrated(self, share: float) -> None:
        """Report the share of the calibration that is done."""
        if self.stop.is_set():
            raise InterruptedError("the conversion ended before its calibration did")
        self.calibrated = share
        self._show("calibrating")

    def _tell(self, name: str, weights: int) -> None:
        self.done_weights += weights
        self._show(name)

    def _show(self, name: str) -> None:
        if self.on_progress is not None:
            done, total = self.done_weights + int(self.calibrated * self.calibrating), self.total + self.calibrating
            self.on_progress(Progress(done, total, name, time.monotonic() - self.started))

    def _step_report(self, task: Task, results: list[_Result]) -> StepReport:
        step = task.step
        measured = [e for e, _ in results if e is not None]
        error = sum(measured, ErrorSums()) if measured else None
        name = step.map.target
        if error is not None:
            self._refuse_infinite(step, error)
        origin = "constant" if name in self.plan.translation.constants else "calibration"
        source = str(step.source) if step.source is not None else origin
        notes = "; ".join(dict.fromkeys(n for _, n in results if n))
        exact = error is None and work.proves_equal(step, measured=self.measure)
        return StepReport(
            name, step.map.shape, step.action.value, source, str(step.target), task.nbytes, error, notes, exact
        )

    def _refuse_infinite(self, step: Step, error: ErrorSums) -> None:
        if not error.finite:
            raise InputError(
                "contains NaN or infinity",
                file=self.plan.source.path,
                tensor=step.map.origin,
                hint="polyquant validate lists all of them",
            )

    def _job(self, step: Step, rows: slice | None, staging: Sink) -> _Result:
        """Read, convert, measure and write one row block, or one whole tensor."""
        if self.stop.is_set():
            return None, ""
        began = time.monotonic()
        try:
            with phase(step.action.value) as spent:
                return self._made(step, rows, staging, spent)
        finally:
            self.busy.append(time.monotonic() - began)

    def _made(self, step: Step, rows: slice | None, staging: Sink, spent: Any) -> _Result:
        """Run a job. spent: its phase."""
        name = step.map.target
        if step.source is None and name in self.plan.translation.constants:
            staging.write(name, "blocks", 0, np.ascontiguousarray(self.plan.translation.constants[name], np.float32))
            return None, ""
        error, note = None, ""
        try:
            for piece in self._pieces(step, rows):
                spent.nbytes += sum(array.nbytes for array in piece.parts.values())
                _write(staging, name, piece)
                if piece.error is not None:
                    error = piece.error if error is None else error + piece.error
                note = piece.note or note
        except CodecError as problem:
            raise InputError(
                problem.message,
                file=self.plan.source.path,
                tensor=step.map.origin,
                expected=problem.expected,
                found=f"{problem.found} (of rows {rows.start} to {rows.stop - 1})"
                if rows and problem.found
                else problem.found,
                hint=problem.hint,
            ) from None
        if error is not None and self.worker is not None and (stated := self.worker.stated(step, error)):
            self._refuse_infinite(step, error)
            for part, array in stated.items():
                staging.write(name, part, 0, array)
        return error, note

    def _pieces(self, step: Step, rows: slice | None) -> Iterable[Piece]:
        if self.worker is not None and self.worker.takes(step):
            return self.worker.pieces(step, rows, measure=self.measure)
        if rows is not None:
            return [work.convert_rows(self.plan, step, rows, measure=self.measure)]
        return work.convert_tensor(self.plan, step, measure=self.measure)


def _write(staging: Sink, tensor: str, piece: Piece) -> None:
    for part, array in piece.parts.items():
        start = piece.start * array.nbytes // max(1, piece.rows)
        offset = start if piece.offsets is None else piece.offsets[part]
        with phase("write", array.nbytes):
            staging.write(tensor, part, offset, np.ascontiguousarray(array))
