"""Execute a plan: stage its layout, run its steps, publish the result."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from polyquant.conversion.memory import working_limit
from polyquant.conversion.parts import job_of, source_states
from polyquant.conversion.read_ahead import window_bytes
from polyquant.conversion.report import Report, StepReport, opened_as
from polyquant.conversion.run import Run
from polyquant.conversion.steps import Plan
from polyquant.conversion.tasks import Part, shares, whole
from polyquant.errors import PlanError
from polyquant.formats.existing import refuse_target, replaceable
from polyquant.formats.sizes import memory_bytes
from polyquant.formats.steps import Progress
from polyquant.ops import native
from polyquant.storage.allocator import keep_freed_memory
from polyquant.storage.locations import RemotePath, located
from polyquant.storage.parts import staged_part
from polyquant.storage.remote.spooled import staged_spooled
from polyquant.storage.remote.uploads import STREAMING, UploadStaging, staged_upload, upload_memory
from polyquant.storage.source import refuse_changed
from polyquant.storage.staging import Resume, Staging, staged
from polyquant.storage.work_folder import CALIBRATION

__all__ = ["Engine", "execute", "kernel_threads", "memory_limit", "refuse_shared"]


@dataclass(frozen=True, slots=True)
class Engine:
    """Workers that do the work. name: "ray" or "dask"; address: of a running cluster, None for one on this machine;
    workers: their number, by default one per core; threads: of each; lease: seconds after which a worker that has not
    finished a unit is replaced, by default ten times the expected time.
    """

    name: str
    workers: int | None = None
    threads: int = 1
    address: str | None = None
    lease: float | None = None


def execute(
    plan: Plan,
    dst: str | os.PathLike[str],
    *,
    resume: Resume = "auto",
    overwrite: bool = False,
    threads: int | None = None,
    measure: bool = True,
    max_memory: int | str | None = None,
    part: Part | None = None,
    command: str = "",
    engine: Engine | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> Report:
    """Write the plan's output to `dst`, which appears only when complete. threads: default all cores. max_memory: limit
    of the process's resident memory, in bytes or as "2GB"; fewer jobs run at once to keep it. part: write only this
    share of the plan, for `merge` (conversion/parts.py); command: makes a part, with {part} for "3/8".
    engine: let workers of a cluster run the steps.

    Raises PlanError (target exists, locked, disk or memory limit too small), InputError (source broken or not
    finite), OSError from the disk.
    """
    target, started = located(dst), time.monotonic()
    keep_freed_memory()
    refuse_shared(target, part, engine)
    refuse_target(target, None if plan.source.in_memory else plan.source.path, overwrite=overwrite)
    tasks = whole(plan) if part is None else shares(plan, part.count)[part.number - 1]
    limit = memory_limit(plan, max_memory, target)
    output: AbstractContextManager[Staging | UploadStaging]
    if part is None:
        output = _whole_output(plan, target, resume, overwrite, max_memory)
    else:
        output = staged_part(
            target, plan.layout, job_of(plan, part.count, command), part.number, tasks=len(tasks),
            sources=source_states(plan), resume=resume, check=lambda: refuse_changed(plan.source.opened),
        )  # fmt: skip
    with output as staging, kernel_threads(threads):
        if engine is not None:
            assert isinstance(staging, Staging)
            reports = _on_engine(engine, plan, target, staging, measure, max_memory, on_progress)
        else:
            shared = None
            if part is not None:
                assert isinstance(staging, Staging)
                from polyquant.calibration.shared import SharedCalibration  # here, for conversions without parts

                shared = SharedCalibration(staging.folder.with_name(CALIBRATION))
            reports = Run(plan, tasks, threads or native.cores(), measure, on_progress, limit, shared).all_tasks(
                staging
            )
            if shared is not None:
                shared.finish()
    nbytes = plan.nbytes if part is None else sum(task.nbytes for task in tasks)
    names = [file.name for file in plan.layout.files]
    path = opened_as(target, names, folder=plan.layout.folder) if part is None else target
    return Report(
        path, plan.format, nbytes, time.monotonic() - started, tuple(reports), plan.warnings, plan.recipe.name
    )


def refuse_shared(target: Path, part: Part | None, engine: Engine | None) -> None:
    """Raise PlanError for a URL that several machines would write."""
    if isinstance(target, RemotePath) and (part is not None or engine is not None):
        raise PlanError(
            f"{'--part writes' if part is not None else '--engine needs'} a folder that all machines share, not a URL",
            file=target,
            hint="write to such a folder, then copy the output, e.g. `aws s3 cp --recursive`",
        )


def _whole_output(
    plan: Plan, target: Path, resume: Resume, overwrite: bool, max_memory: int | str | None
) -> AbstractContextManager[Staging | UploadStaging]:
    """The output that becomes visible at `target` when complete."""

    def check() -> None:
        refuse_changed(plan.source.opened)

    old = replaceable if overwrite else None
    if not isinstance(target, RemotePath):
        return staged(target, plan.layout, plan.fingerprint, resume=resume, replaceable=old, check=check)
    if target.scheme not in STREAMING:
        return staged_spooled(target, plan.layout, plan.fingerprint, resume=resume, replaceable=old, check=check)
    budget = upload_memory(plan.layout, None if max_memory is None else memory_bytes(max_memory))
    return staged_upload(
        target, plan.layout, plan.fingerprint, budget=budget, resume=resume, replaceable=old, check=check
    )


def _on_engine(
    engine: Engine, plan: Plan, target: Path, staging: Staging, measure: bool, max_memory: int | str | None,
    on_progress: Callable[[Progress], None] | None,
) -> list[StepReport]:  # fmt: skip
    """Run the steps on a cluster. Raises PlanError for a plan that workers cannot make."""
    from polyquant.conversion.engines.cluster import Assignment, cluster_named
    from polyquant.conversion.engines.driver import run_units

    if plan.request is None:
        raise PlanError("workers cannot read arrays in memory", hint="save them, or omit the engine")
    assignment = Assignment(
        plan.request,
        str(target),
        str(staging.folder),
        plan.identity,
        str(Path.cwd()),
        engine.threads,
        measure,
        max_memory,
    )
    workers = engine.workers or max(1, native.cores() // engine.threads)
    cluster = cluster_named(engine.name, assignment, workers=workers, address=engine.address)
    try:
        return run_units(plan, staging, cluster, lease=engine.lease, on_progress=on_progress)
    finally:
        cluster.close()


def memory_limit(plan: Plan, max_memory: int | str | None, target: Path | None = None) -> int | None:
    """Bytes that the jobs of a plan may use at once; None without a limit. target: needs memory for parts if it is a
    URL. Raises PlanError if one job needs more.
    """
    if max_memory is None:
        return None
    most = memory_bytes(max_memory)
    window = window_bytes(plan.source, most)
    if isinstance(target, RemotePath) and target.scheme in STREAMING:
        window += upload_memory(plan.layout, most)
    return working_limit(plan.steps, calibrated=plan.text is not None, max_memory=most, window=window)


@contextmanager
def kernel_threads(count: int | None) -> Iterator[None]:
    """Set the thread count of the native kernels (a process-wide setting) within the block."""
    before = native.threads()
    if count is not None:
        native.set_threads(min(count, 256))
    try:
        yield
    finally:
        if count is not None:
            native.set_threads(before)
