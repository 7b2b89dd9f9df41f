"""The folder of a job in parts, next to the target: every part writes its bytes at their final place in it.

    .NAME.polyquant-parts-JJJJJJJJCCCCCCCC/   J: of the job, so that all parts find the same folder
        journal          names the job, its files and the number of parts; locked, shared by the parts that are running
        files/           the future output
        part-3-of-8      the journal of a part, and its receipt once it is complete

A part may run anywhere, again, or twice at once: its bytes and their places follow from the job alone. The lines of a
part's journal have their own checksums; an invalid line is skipped.

    {"part": 3, "of": 8, "tasks": NUMBER, "sources": {NAME: [SIZE, MTIME_NS], ...}}
    {"tensor": NAME, "rows": [START, STOP, ALL], "task": NUMBER, "report": ..., "blocks": [...]}
    {"complete": true}
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

from polyquant.errors import PlanError, printable
from polyquant.storage import journal as journals
from polyquant.storage.claims import candidates, parent_locked, taken, unmerged
from polyquant.storage.journal import Done
from polyquant.storage.renames import named, rename_new, sync_folder
from polyquant.storage.spans import Span, gaps
from polyquant.storage.staging import ForeignFileError, Staging
from polyquant.storage.work_folder import Resume, WorkFolder, part_name, parts_name
from polyquant.types import Layout

__all__ = [
    "Job",
    "PartJournal",
    "Receipt",
    "Sources",
    "between_blocks",
    "folder_of",
    "joined",
    "receipt",
    "staged_part",
]

MOST_PARTS = 100_000
_LARGEST = 1 << 62

Sources: TypeAlias = Mapping[str, tuple[int, int]]
"""Name of a source file -> (size in bytes, mtime in ns) when it was read."""


@dataclass(frozen=True, slots=True)
class Job:
    """A job in parts, as its folder's journal describes it.

    name: a hash of what determines its bytes. sizes: of the files. folder: True if the target is a folder. payload:
    bytes that the parts write; headers: CRC-32 of all others, which are known in advance. command: makes a part, with
    {part} for "3/8".
    """

    name: str
    files: tuple[str, ...]
    count: int
    sizes: tuple[int, ...]
    folder: bool
    payload: int
    headers: int
    format: str
    version: str
    command: str

    @property
    def header(self) -> dict[str, Any]:
        """The values of the journal's first line that only a job in parts has."""
        return {key: value for key, value in asdict(self).items() if key not in ("name", "files")}

    @staticmethod
    def of(journal: journals.Journal) -> Job | None:
        """The job of a journal; None if it is not one in parts, or not valid."""
        header = journal.parts
        if not isinstance(header, dict) or not isinstance(header.get("sizes"), list):
            return None
        try:
            job = Job(journal.job, journal.files, **{**header, "sizes": tuple(header["sizes"])})
        except TypeError:  # other keys
            return None
        numbers = (job.count, job.payload, job.headers, *job.sizes)
        texts = (job.name, job.format, job.version, job.command, *job.files)
        sound = (
            all(isinstance(n, int) and 0 <= n < _LARGEST for n in numbers)
            and all(isinstance(t, str) for t in texts)
            and 1 <= job.count <= MOST_PARTS
            and len(job.files) == len(job.sizes)
            and all(_inside(name, folder=job.folder) for name in job.files)
        )
        return job if sound else None

    def command_of(self, part: int) -> str:
        """The command that makes a part."""
        return self.command.replace("{part}", f"{part}/{self.count}")


def _inside(name: str, *, folder: bool) -> bool:
    """True for the name of a file directly in the output, or in a subfolder of a folder."""
    words = name.split("/")
    return len(words) <= (2 if folder else 1) and "\0" not in name and all(w not in ("", ".", "..") for w in words)


@dataclass(frozen=True, slots=True)
class Receipt:
    """The journal of one part."""

    part: int
    tasks: int
    sources: Sources
    done: Mapping[str, Done]
    complete: bool


class PartJournal:
    """The open journal of one part; `files` is the folder of the job's files."""

    def __init__(self, work: WorkFolder, fd: int, name: str) -> None:
        self.files, self._fd, self._path = work.files, fd, work.path / name

    def append(self, **values: Any) -> None:
        """Append one line. Raises OSError."""
        with named(self._path):
            journals.append(self._fd, **values)

    def restart(self, **first: Any) -> None:
        """Remove all lines and append the first one. Raises OSError."""
        with named(self._path):
            os.ftruncate(self._fd, 0)
        self.append(**first)

    def end_torn_line(self) -> None:
        """After a kill: let the next line begin as one. Raises OSError."""
        size = os.fstat(self._fd).st_size
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            with named(self._path):
                os.write(self._fd, b"\n")

    def sync(self) -> None:
        """Sync the journal to disk. Raises OSError."""
        with named(self._path):
            os.fsync(self._fd)


def receipt(folder: Path, part: int, job: Job) -> Receipt | None:
    """The receipt of a part, complete or not; None if there is none, or no valid one."""
    try:
        fd = os.open(folder / part_name(part, job.count), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        return _receipt(fd, part, job)
    finally:
        os.close(fd)


def _receipt(fd: int, part: int, job: Job) -> Receipt | None:
    try:
        found = _parsed_receipt(fd, part, job.count)
    except (AttributeError, IndexError, KeyError, OSError, TypeError, ValueError):  # not written by this program
        return None
    if found is not None:
        if not all(type(d.task) is int and (d.rows is None or type(d.rows[0]) is int) for d in found.done.values()):
            return None
        for block in (b for done in found.done.values() for b in done.blocks):
            if not all(type(n) is int and n >= 0 for n in (block.file, block.offset, block.nbytes, block.crc)):
                return None
            if block.file >= len(job.files):
                return None
            if block.offset + block.nbytes > job.sizes[block.file]:
                return None
    return found


def _parsed_receipt(fd: int, part: int, count: int) -> Receipt | None:
    first, done, ended = None, dict[str, Done](), False
    for entry in filter(None, map(journals.parsed, journals.lines(fd))):
        if first is None and (entry.get("part"), entry.get("of")) == (part, count):
            first = entry
        if "tensor" in entry:
            done[entry["tensor"]] = journals.finished(entry)
        ended = ended or "complete" in entry
    if first is None:
        return None
    sources = {name: (state[0], state[1]) for name, state in first["sources"].items()}
    return Receipt(part, first["tasks"], sources, done, ended and len(done) == first["tasks"])


def between_blocks(receipts: Iterable[Receipt], job: Job) -> Iterator[tuple[int, int, int]]:
    """Yield (file, start, stop) of the bytes that no part of a complete job writes: headers and padding."""
    spans: list[list[Span]] = [[] for _ in job.files]
    for block in (b for r in receipts for d in r.done.values() for b in d.blocks):
        spans[block.file].append((block.offset, block.offset + block.nbytes))
    for file, size in enumerate(job.sizes):
        for start, stop in gaps(spans[file], size):
            yield file, start, stop


def folder_of(target: Path) -> Path | None:
    """The folder of the job in parts that waits to be merged into `target`; None if there is none."""
    found = candidates(target, parts=True) if target.parent.is_dir() else []
    return found[0] if found else None


@contextmanager
def joined(target: Path, job: Job) -> Iterator[WorkFolder]:
    """Open the folder of a job, created by the first part, until the block ends; other parts may have it open too.

    Raises PlanError if it was made for another number of parts or by another version, if parts of another job or
    another run use the target, OSError.
    """
    with ExitStack() as stack:
        with parent_locked(target.parent):
            path = target.parent / parts_name(target.name, job.name)
            unmerged(target, path)
            for leftover in taken(target, stack):
                if not leftover.settle():
                    leftover.discard()
            if not os.path.lexists(path):
                _create(path, target, job)
            work = WorkFolder.take(path, target, shared=True)
            if work is None:
                raise PlanError("is not a folder of this program", file=path, hint="move it away")
            stack.callback(work.close)
        _refuse_other(work, target, job)
        with suppress(FileExistsError):  # killed while the folder was being removed
            work.files.mkdir()
        yield work


def _create(path: Path, target: Path, job: Job) -> None:
    """Create the folder under a random name and rename it, so that it is complete under its own."""
    work = WorkFolder.create(target, job.name, job.files, parts=job.header)
    try:
        sync_folder(work.path)
        rename_new(work.path, path)
    except FileExistsError:  # another machine was faster
        work.discard()
    except OSError as error:
        work.abandon(error, resumable=False)
        raise
    finally:
        work.close()


def _refuse_other(work: WorkFolder, target: Path, job: Job) -> None:
    """Raise PlanError if the folder was made for another job."""
    journal = work.read_journal()
    theirs = Job.of(journal) if journal is not None else None
    name = printable(target.name)
    if theirs is None:
        raise PlanError("its parts have no valid journal", file=target, hint=f"polyquant merge {name} --discard")
    if theirs.version != job.version:
        raise PlanError(
            "the other parts were made by another version", file=target, expected=f"polyquant {theirs.version}",
            found=job.version, hint=f"install that version, or polyquant merge {name} --discard",
        )  # fmt: skip
    if theirs.count != job.count:
        raise PlanError(
            "the other parts are of another number", file=target, expected=f"--part I/{theirs.count}",
            found=f"I/{job.count}", hint=f"keep the number, or polyquant merge {name} --discard",
        )  # fmt: skip
    if (theirs.name, theirs.files, theirs.sizes) != (job.name, job.files, job.sizes):
        raise PlanError("the other parts belong to another job", file=target, hint=f"polyquant merge {name} --discard")


@contextmanager
def staged_part(
    dst: Path, layout: Layout, job: Job, part: int, *, tasks: int, sources: Sources, resume: Resume = "auto",
    check: Callable[[], None],
) -> Iterator[Staging]:  # fmt: skip
    """Stage one part of a job: its `tasks` tensors or rows of tensors. The part is complete when the block ends.

    `Staging.done` has what an earlier run of this part completed. Nothing appears at `dst`. check: called when all
    bytes are written; may raise. Raises as `joined`, and
    PlanError if resume="required" and there is nothing to resume. After an error the folder is kept, unless it holds
    nothing yet.
    """
    dst = dst.absolute()
    with joined(dst, job) as work:
        try:
            with _part_journal(work, part, job, tasks, sources, resume) as (journal, done):
                with closing(_staging(work, journal, layout)) as staging:
                    staging.prepare(done)
                    yield staging
                    staging.sync()
                check()
                journal.append(complete=True)
                journal.sync()
            sync_folder(work.path)
            sync_folder(dst.parent)
        except BaseException as error:
            if not _discard_empty(work, job):
                error.add_note(f"the same command resumes this part; the parts are in '{printable(work.path)}'")
            raise


def _staging(work: WorkFolder, journal: PartJournal, layout: Layout) -> Staging:
    try:
        return Staging(journal, layout)
    except ForeignFileError as problem:
        raise PlanError(
            "its parts contain a file that polyquant did not write", file=work.target, found=problem,
            hint=f"move it out of {printable(work.path.name)}",
        ) from None  # fmt: skip


def _discard_empty(work: WorkFolder, job: Job) -> bool:
    """Remove the folder if no part has completed a tensor and none is running; True if it was removed."""
    receipts = (receipt(work.path, part, job) for part in range(1, job.count + 1))
    if any(r is not None and r.done for r in receipts):
        return False
    try:
        fcntl.flock(work.journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    work.discard()
    return True


@contextmanager
def _part_journal(
    work: WorkFolder, part: int, job: Job, tasks: int, sources: Sources, resume: Resume
) -> Iterator[tuple[PartJournal, Mapping[str, Done]]]:
    """Open the journal of a part; also return what an earlier run of it completed. Raises PlanError, OSError."""
    name = part_name(part, job.count)
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
    fd = os.open(work.path / name, flags, 0o600)
    try:
        earlier = _receipt(fd, part, job) if resume != "never" else None
        if resume == "required" and earlier is None:
            raise PlanError("nothing to resume: no unfinished run of this part", file=work.target, hint="omit --resume")
        journal = PartJournal(work, fd, name)
        if earlier is None or earlier.sources != sources or earlier.tasks != tasks:
            journal.restart(part=part, of=job.count, tasks=tasks, sources={k: list(v) for k, v in sources.items()})
            earlier = None
        journal.end_torn_line()
        yield journal, earlier.done if earlier is not None else {}
    finally:
        os.close(fd)
