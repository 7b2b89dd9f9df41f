"""Carry out a plan: row blocks stream from the source's files to their slots, on several threads, errors measured on the way.

Memory holds the row blocks in flight, never a model. A step whose codec cannot be cut by rows (I2_S, TL: one scale, one
permutation for the tensor) holds that one tensor's codes, one byte a weight.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyquant.codecs.transcode import transcode
from polyquant.errors import CodecError, InputError
from polyquant.ops.metrics import ErrorSums, error_sums
from polyquant.pipeline.plan import Plan, Step
from polyquant.quantizers.absmean import absmean_codes, absmean_floats
from polyquant.storage.staging import Resume, Staging, refuse_target, staged
from polyquant.types import Action, Floats, Parts, Ternary, Weight, as_matrix

__all__ = ["Progress", "Report", "StepReport", "cores", "execute"]


@dataclass(frozen=True, slots=True)
class Progress:
    """Told after every row block: source weights done and in all, and where we are."""

    done: int
    total: int
    tensor: str
    seconds: float


@dataclass(frozen=True, slots=True)
class StepReport:
    """What happened to one tensor. error is None where nothing was lost or it was not measured; note says what the scale did."""

    tensor: str
    shape: tuple[int, ...]
    action: str
    source: str
    target: str
    nbytes: int
    error: ErrorSums | None = None
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        out = asdict(self)
        if self.error is not None:
            out |= {
                "snr_db": self.error.snr,
                "rrmse": self.error.rrmse,
                "cosine": self.error.cosine,
                "max_error": self.error.worst,
            }
        return out

    @staticmethod
    def from_json(entry: dict[str, Any]) -> StepReport:
        """The inverse of `to_json`."""
        error = entry.get("error")
        names = ("tensor", "action", "source", "target", "nbytes", "note")
        return StepReport(
            shape=tuple(entry["shape"]), error=ErrorSums(**error) if error else None, **{n: entry[n] for n in names}
        )


@dataclass(frozen=True, slots=True)
class Report:
    """A finished conversion."""

    path: Path
    format: str
    nbytes: int
    seconds: float
    steps: tuple[StepReport, ...]
    warnings: tuple[str, ...] = field(default=())

    @property
    def error(self) -> ErrorSums:
        """Sums over all measured tensors."""
        return sum((s.error for s in self.steps if s.error is not None), ErrorSums())

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        total = self.error
        return {
            "path": str(self.path),
            "format": self.format,
            "bytes": self.nbytes,
            "seconds": self.seconds,
            "rrmse": total.rrmse,
            "snr_db": total.snr,
            "warnings": list(self.warnings),
            "tensors": [s.to_json() for s in self.steps],
        }


def execute(
    plan: Plan,
    dst: str | os.PathLike[str],
    *,
    resume: Resume = "auto",
    overwrite: bool = False,
    threads: int | None = None,
    measure: bool = True,
    on_progress: Callable[[Progress], None] | None = None,
) -> Report:
    """Write the plan's output to `dst`, which appears only when whole. threads: default all cores.

    Raises PlanError (target exists, locked, disk too small), InputError (source broken or not finite), OSError from the disk.
    """
    target, started = Path(dst), time.monotonic()
    refuse_target(target, plan.source.path, overwrite=overwrite)
    run = _Run(plan, threads or cores(), measure, on_progress)
    with staged(target, plan.layout, plan.fingerprint, resume=resume, overwrite=overwrite) as staging:
        reports = run.all_steps(staging)
    return Report(target, plan.format, plan.nbytes, time.monotonic() - started, tuple(reports), plan.warnings)


def cores() -> int:
    """Processors that this process may use."""
    allowed = getattr(os, "sched_getaffinity", None)  # Linux; elsewhere all there are
    return len(allowed(0)) if allowed else os.cpu_count() or 1


class _Run:
    """The moving state of one execution: a bounded window of jobs on a thread pool."""

    def __init__(self, plan: Plan, threads: int, measure: bool, on_progress: Callable[[Progress], None] | None) -> None:
        self.plan, self.threads, self.measure, self.on_progress = plan, threads, measure, on_progress
        self.total = sum(s.weights for s in plan.steps)
        self.done_weights = 0
        self.started = time.monotonic()
        self.stop = threading.Event()

    def all_steps(self, staging: Staging) -> list[StepReport]:
        """Run what the journal does not hold yet; reports in the plan's order."""
        reports = {name: StepReport.from_json(entry) for name, entry in staging.done.items()}
        self.done_weights = sum(s.weights for s in self.plan.steps if s.map.target in reports)
        open_blocks: dict[str, int] = {}
        sums: dict[str, list[tuple[ErrorSums | None, str]]] = {}
        pending: dict[Future[tuple[ErrorSums | None, str]], tuple[Step, int]] = {}

        def settle(done: set[Future[tuple[ErrorSums | None, str]]]) -> None:
            for future in done:
                step, weights = pending.pop(future)
                name = step.map.target
                sums[name].append(future.result())
                self._tell(name, weights)
                open_blocks[name] -= 1
                if open_blocks[name] == 0:
                    reports[name] = self._step_report(step, sums.pop(name))
                    staging.finish(name, reports[name].to_json())

        with ThreadPoolExecutor(self.threads) as pool:
            try:
                for step in self.plan.steps:
                    if step.map.target in reports:
                        continue
                    blocks = list(_blocks(step))
                    open_blocks[step.map.target], sums[step.map.target] = len(blocks), []
                    for rows in blocks:
                        if len(pending) >= 2 * self.threads:
                            settle(wait(pending, return_when=FIRST_COMPLETED).done)
                        job = pool.submit(self._job, step, rows, staging)
                        pending[job] = (
                            step,
                            (rows.stop - rows.start) * as_matrix(step.map.shape)[1] if rows else step.weights,
                        )
                while pending:
                    settle(wait(pending, return_when=FIRST_COMPLETED).done)
            finally:  # after an error or an interrupt: what has begun ends early, the rest never starts
                self.stop.set()
                for future in pending:
                    future.cancel()
        return [reports[s.map.target] for s in self.plan.steps]

    def _tell(self, name: str, weights: int) -> None:
        self.done_weights += weights
        if self.on_progress is not None:
            self.on_progress(Progress(self.done_weights, self.total, name, time.monotonic() - self.started))

    def _step_report(self, step: Step, results: list[tuple[ErrorSums | None, str]]) -> StepReport:
        measured = [e for e, _ in results if e is not None]
        error = sum(measured, ErrorSums()) if measured else None
        name = step.map.target
        if error is not None and not error.finite:
            raise InputError(
                "holds NaN or infinity",
                file=self.plan.source.path,
                tensor=step.map.source,
                hint="polyquant validate names them all",
            )
        source = str(step.source) if step.source is not None else "constant"
        notes = "; ".join(dict.fromkeys(n for _, n in results if n))
        return StepReport(name, step.map.shape, step.action.value, source, str(step.target), step.nbytes, error, notes)

    def _job(self, step: Step, rows: slice | None, staging: Staging) -> tuple[ErrorSums | None, str]:
        """One row block, or one whole tensor: read, convert, measure, write."""
        if self.stop.is_set():
            return None, ""
        name = step.map.target
        if step.source is None:
            staging.write(name, "blocks", 0, np.ascontiguousarray(self.plan.translation.constants[name], np.float32))
            return None, ""
        weight = self.plan.source[step.map.source]
        try:
            if rows is not None:
                return self._stream(step, weight, rows, staging), ""
            parts, error, note = _whole(step, weight)
        except CodecError as problem:
            raise InputError(
                problem.message,
                file=self.plan.source.path,
                tensor=weight.name,
                expected=problem.expected,
                found=problem.found,
                hint=problem.hint,
            ) from None
        for part, array in parts.items():
            staging.write(name, part, 0, np.ascontiguousarray(array))
        return error, note

    def _stream(self, step: Step, weight: Weight, rows: slice, staging: Staging) -> ErrorSums | None:
        """Rows [a, b) of the target."""
        _, k = as_matrix(step.map.shape)
        shape = (rows.stop - rows.start, k)
        parts = _read_rows(weight, rows, step.map.row_order)
        importance = self.plan.importance.get(step.map.target)
        out, error = _convert(step, parts, shape, importance, measure=self.measure)
        for part, array in out.items():
            row_bytes = array.nbytes // max(1, shape[0])
            staging.write(step.map.target, part, rows.start * row_bytes, np.ascontiguousarray(array))
        return error


def _blocks(step: Step) -> Iterator[slice | None]:
    """Row blocks of a step; one None where it cannot be cut."""
    rows, _ = as_matrix(step.map.shape)
    reordered_vector = step.map.row_order is not None and len(step.map.shape) == 1  # one row as codecs see it
    if not step.streams or step.map.ternarize or rows == 0 or reordered_vector:
        yield None
        return
    for a in range(0, rows, step.block_rows):
        yield slice(a, min(rows, a + step.block_rows))


def _read_rows(weight: Weight, rows: slice, order: NDArray[np.int64] | None) -> Parts:
    """Target rows by positioned reads; a permutation reads the span that its rows lie in."""
    if order is None:
        return weight.read(rows)
    wanted = order[rows]
    low, high = int(wanted.min()), int(wanted.max()) + 1
    return {part: array[wanted - low] for part, array in weight.read(slice(low, high)).items()}


def _convert(
    step: Step, parts: Parts, shape: tuple[int, int], importance: NDArray[np.float32] | None, *, measure: bool
) -> tuple[Parts, ErrorSums | None]:
    """One row block from parts to parts, by the step's action."""
    assert step.source is not None
    source, target = step.source, step.target
    if step.action is Action.COPY:
        return parts, None
    if step.action is Action.TRANSCODE and target.form is Ternary:
        out, _ = transcode(parts, shape, source, target)
        return out, None
    w = source.dequantize(parts, shape)
    out = target.pack(Floats(w) if target.form is Floats else target.quantize(w, importance=importance))
    return out, error_sums(w, target.dequantize(out, shape)) if measure else None


def _whole(step: Step, weight: Weight) -> tuple[Parts, ErrorSums | None, str]:
    """A tensor that cannot be cut: parts, error, and what happened to the scale."""
    source, target, shape, order = weight.codec, step.target, step.map.shape, step.map.row_order
    if step.action is Action.COPY and order is None:
        return weight.read(), None, ""
    if source.form is Ternary and target.form is Ternary and order is None:
        parts, change = transcode(weight.read(), shape, source, target)
        return parts, None, str(change)
    codes = _ternary_codes(weight, step) if target.form is Ternary else None
    if codes is not None:
        if order is not None:
            codes = Ternary(codes.codes[order], codes.scale if codes.scale.size == 1 else codes.scale[order])
        return target.pack(codes), None, ""
    w = absmean_floats(weight) if step.map.ternarize else weight.codec.dequantize(weight.read(), shape)
    w = w.reshape(as_matrix(shape))
    if order is not None:
        w = w[:, order] if len(shape) == 1 else w[order]
    parts = target.pack(Floats(w) if target.form is Floats else target.quantize(w))
    return parts, error_sums(w, target.dequantize(parts, w.shape)), ""


def _ternary_codes(weight: Weight, step: Step) -> Ternary:
    """Codes of a whole tensor, one byte a weight: ternary already, a BitNet master weight, or floats that must be ternary."""
    rows, k = as_matrix(weight.shape)
    if weight.codec.form is Ternary:
        codes: Ternary = weight.codec.unpack(weight.read(), weight.shape)
        return codes
    if step.map.ternarize:
        return absmean_codes(weight)
    out, scale = np.empty((rows, k), np.int8), np.float32(0)
    for a in range(0, rows, step.block_rows):
        part = slice(a, min(rows, a + step.block_rows))
        block = step.target.quantize(weight.codec.dequantize(weight.read(part), (part.stop - a, k)))
        assert isinstance(block, Ternary)
        out[part] = block.codes
        found = np.float32(block.scale.max())
        if found != 0 and scale not in (0, found):
            raise CodecError(
                "rows have different scales; one scale per tensor cannot hold them",
                expected=scale,
                found=found,
                hint="choose tq1_0 or tq2_0",
            )
        scale = max(scale, found)
    return Ternary(out, np.array([scale], np.float32))
