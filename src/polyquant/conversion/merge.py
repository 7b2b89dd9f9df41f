"""Merge the parts of a conversion: check every receipt, then publish the files that the parts have written.

Parts that ran in one shared folder have written everything already. Parts of other machines are copied from their
folders (`sources`); every block is checked against its receipt.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from polyquant import __version__
from polyquant.conversion.report import Report, StepReport, opened_as
from polyquant.errors import InputError, PlanError, printable
from polyquant.formats.existing import refuse_target, replaceable
from polyquant.formats.progress import shows_progress
from polyquant.formats.steps import Progress
from polyquant.ops.metrics import ErrorSums
from polyquant.storage.journal import Block
from polyquant.storage.parts import Job, Receipt, between_blocks, folder_of, receipt
from polyquant.storage.parts_copy import copy_parts
from polyquant.storage.renames import named, sync_folder
from polyquant.storage.staging import crc_of, publish
from polyquant.storage.work_folder import WorkFolder

__all__ = ["discard_parts", "merge", "sum_reports"]

_NAMED = 8
"""Missing parts that a message lists."""


@shows_progress("merge")
def merge(
    dst: str | os.PathLike[str],
    sources: Sequence[str | os.PathLike[str]] = (),
    *,
    overwrite: bool = False,
    verify: bool = False,
    allow_copies: bool = False,
    progress: bool = False,
    on_progress: Callable[[Progress], None] | None = None,
) -> Report:
    """Publish the output of a conversion in parts at `dst`, after checking the receipts of all parts.

    sources: folders with parts that ran elsewhere, without a shared folder; their bytes are copied and checked first.
    verify: read every block again and check it. allow_copies: the parts read copies of the source with different
    modification times. Raises PlanError if there are no parts, parts are running, missing or contradict each other, or
    the target exists; InputError for damaged bytes; OSError. progress, on_progress: of the
    bytes of parts that are copied.
    """
    target, started = Path(dst).absolute(), time.monotonic()
    refuse_target(target, None, overwrite=overwrite)
    if sources:
        copy_parts(target, [Path(s) for s in sources], on_progress=_copying(on_progress))
    with _taken(target) as work:
        job = _job(work, target)
        receipts = _complete(work.path, job, target)
        _refuse_contradictions(receipts, job, target, allow_copies=allow_copies)
        reports = tuple(_reports(receipts, job, target))
        with _opened(work, job) as fds:
            _check_coverage(receipts, job, target)
            _check_headers(receipts, job, fds, target)
            if verify:
                _verify(receipts, job, fds, target)
            for name, fd in zip(job.files, fds, strict=True):
                with named(work.files / name):
                    os.fsync(fd)
        try:
            sync_folder(work.files)
            publish(work, target, job.files, folder=job.folder, replaceable=replaceable if overwrite else None)
        except BaseException:
            work.settle()
            raise
    path = opened_as(target, job.files, folder=job.folder)
    return Report(path, job.format, sum(job.sizes), time.monotonic() - started, reports)


def _copying(on_progress: Callable[[Progress], None] | None) -> Callable[[int, int, str], None] | None:
    """Report copied bytes as progress."""
    if on_progress is None:
        return None
    return lambda done, total, part: on_progress(Progress(done, total, part, 0.0))


def discard_parts(dst: str | os.PathLike[str]) -> None:
    """Remove the parts of a conversion that wait to be merged into `dst`. Raises PlanError if there are none, or if
    one is running.
    """
    with _taken(Path(dst).absolute()) as work:
        work.discard()
        if os.path.lexists(work.path):
            raise PlanError("contains files that polyquant did not write", file=work.path, hint="remove it yourself")


@contextmanager
def _taken(target: Path) -> Iterator[WorkFolder]:
    """Lock the folder of the parts. Raises PlanError if there is none, or if parts are running."""
    path = folder_of(target)
    if path is None:
        raise PlanError("there are no parts to merge", file=target, hint="make them with --part 1/N to N/N")
    try:
        work = WorkFolder.take(path, target)
    except PlanError:
        raise PlanError("parts are still being written", file=target, hint="merge when they are done") from None
    if work is None:
        raise PlanError("is not a folder of this program", file=path, hint="move it away")
    try:
        yield work
    except BaseException as error:
        if os.path.lexists(path):
            error.add_note(f"the parts are in '{printable(path)}'")
        raise
    finally:
        work.close()


def _job(work: WorkFolder, target: Path) -> Job:
    journal = work.read_journal()
    job = Job.of(journal) if journal is not None else None
    if job is None:
        hint = f"polyquant merge {printable(target.name)} --discard, and make the parts again"
        raise PlanError("its parts have no valid journal", file=target, hint=hint)
    if job.version != __version__:
        raise PlanError(
            "the parts were made by another version", file=target, expected=f"polyquant {job.version}",
            found=__version__, hint="install that version to merge them",
        )  # fmt: skip
    return job


def _complete(folder: Path, job: Job, target: Path) -> list[Receipt]:
    """The receipts of all parts. Raises PlanError that names the missing parts and the command for the first."""
    found = {part: receipt(folder, part, job) for part in range(1, job.count + 1)}
    missing = [part for part, r in found.items() if r is None or not r.complete]
    if missing:
        first = found[missing[0]]
        state = "was not run" if first is None else f"has {len(first.done)} of {first.tasks} tensors"
        raise PlanError(
            f"part {missing[0]} of {job.count} {state}" if len(missing) == 1
            else f"{len(missing)} of {job.count} parts are missing: {_listed(missing)}",
            file=target, hint=job.command_of(missing[0]),
        )  # fmt: skip
    return [r for r in found.values() if r is not None]


def _listed(parts: Sequence[int]) -> str:
    more = f" and {len(parts) - _NAMED} more" if len(parts) > _NAMED else ""
    return ", ".join(map(str, parts[:_NAMED])) + more


def _refuse_contradictions(receipts: Sequence[Receipt], job: Job, target: Path, *, allow_copies: bool) -> None:
    """Raise PlanError if parts read different sources."""
    first = receipts[0]
    for other in receipts[1:]:
        for name in sorted({*first.sources, *other.sources}):
            a, b = first.sources.get(name), other.sources.get(name)
            if a == b or (allow_copies and a is not None and b is not None and a[0] == b[0]):
                continue
            same_size = a is not None and b is not None and a[0] == b[0]
            raise PlanError(
                f"the source changed between part {first.part} and part {other.part}", file=target,
                expected=f"{name}: {_state(a)}", found=_state(b),
                hint="--allow-copies if both are copies of one file" if same_size
                else f"make the part again: {job.command_of(other.part)}",
            )  # fmt: skip


def _state(state: tuple[int, int] | None) -> str:
    if state is None:
        return "no such file"
    return f"{state[0]:,} bytes of {time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime(state[1] / 1e9))}"


@contextmanager
def _opened(work: WorkFolder, job: Job) -> Iterator[list[int]]:
    """Descriptors of the job's files. Raises PlanError if one is missing, foreign or of a different size."""
    with ExitStack() as stack:
        fds = []
        for name, size in zip(job.files, job.sizes, strict=True):
            try:
                fds.append(os.open(work.files / name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK))
            except OSError:
                hint = f"make a part again: {job.command_of(1)}"
                raise PlanError("a file of the parts is missing", file=work.files / name, hint=hint) from None
            stack.callback(os.close, fds[-1])
            status = os.fstat(fds[-1])
            if status.st_size != size or status.st_nlink != 1:
                raise PlanError("another program changed it", file=work.files / name, expected=f"{size} bytes",
                                found=status.st_size, hint="make the parts again")  # fmt: skip
        yield fds


def _check_coverage(receipts: Iterable[Receipt], job: Job, target: Path) -> None:
    """Raise PlanError unless the blocks of all parts, without overlap, are the payload of the job."""
    spans = sorted((b.file, b.offset, b.nbytes) for r in receipts for d in r.done.values() for b in d.blocks)
    overlap = any(a[0] == b[0] and a[1] + a[2] > b[1] for a, b in pairwise(spans))
    total = sum(n for _, _, n in spans)
    if overlap or total != job.payload:
        raise PlanError(
            "the parts do not make up the whole", file=target, expected=f"{job.payload:,} bytes",
            found=f"{total:,} bytes" + (", some written by two parts" if overlap else ""),
            hint=f"polyquant merge {printable(target.name)} --discard, and make the parts again",
        )  # fmt: skip


def _check_headers(receipts: Iterable[Receipt], job: Job, fds: Sequence[int], target: Path) -> None:
    """Raise InputError if the bytes that no part writes are damaged."""
    crc = 0
    for file, start, stop in between_blocks(receipts, job):
        crc = crc_of(fds[file], Block(file, start, stop - start, 0), crc)
    if crc != job.headers:
        raise InputError("its headers are damaged", file=target, hint=f"make a part again: {job.command_of(1)}")


def _verify(receipts: Iterable[Receipt], job: Job, fds: Sequence[int], target: Path) -> None:
    """Raise InputError if a block is not what its part wrote."""
    for r in receipts:
        for tensor, done in r.done.items():
            for block in done.blocks:
                if crc_of(fds[block.file], block) != block.crc:
                    raise InputError(
                        f"does not hold what part {r.part} wrote", file=target, tensor=tensor,
                        found=f"other bytes at {block.offset} of {job.files[block.file]}",
                        hint=f"make the part again: {job.command_of(r.part)}",
                    )  # fmt: skip


def _reports(receipts: Sequence[Receipt], job: Job, target: Path) -> Iterator[StepReport]:
    """The reports of all tensors in the order of the plan; those of rows of one tensor are added. Raises PlanError."""
    by_tensor: dict[str, list[tuple[int, int, StepReport]]] = {}
    for r in receipts:
        for name, done in r.done.items():
            try:
                report = StepReport.from_json(done.report)
            except (AttributeError, KeyError, TypeError, ValueError):
                hint = f"make the part again: {job.command_of(r.part)}"
                raise PlanError(f"the receipt of part {r.part} is not valid", file=target, hint=hint) from None
            start = done.rows[0] if done.rows is not None else 0
            by_tensor.setdefault(name, []).append((done.task, start, report))
    for pieces in sorted(by_tensor.values(), key=lambda p: p[0][0]):
        first, *others = (report for _, _, report in sorted(pieces, key=lambda p: p[1]))
        yield sum_reports(first, others)


def sum_reports(first: StepReport, others: Iterable[StepReport]) -> StepReport:
    """The report of a tensor from those of its rows."""
    for other in others:
        errors = [e for e in (first.error, other.error) if e is not None]
        error = sum(errors, ErrorSums()) if errors else None
        exact = first.exact and other.exact
        nbytes, note = first.nbytes + other.nbytes, first.note or other.note
        first = replace(first, nbytes=nbytes, error=error, note=note, exact=exact)
    return first
