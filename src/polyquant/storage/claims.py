"""Exclusive use of work folders: runs that start on a target claim theirs, one at a time, and remove abandoned ones.

A run takes over the folder of its job and removes those of other jobs. It refuses while another run is using one,
and while parts of a job (storage/parts.py) wait to be merged: they may be the work of many machines.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from polyquant.errors import PlanError, printable
from polyquant.storage.journal import Journal
from polyquant.storage.renames import sync_folder
from polyquant.storage.work_folder import FILES, Resume, WorkFolder, belongs_to

__all__ = ["candidates", "claimed", "held_bytes", "parent_locked", "settle_all", "taken", "unmerged"]

_PATIENCE = 10.0
"""Seconds to wait for another run that is starting in the same folder."""


def candidates(target: Path, *, parts: bool) -> list[Path]:
    """The work folders of this target; parts: of jobs in parts."""
    with os.scandir(target.parent) as entries:
        return sorted(Path(e.path) for e in entries if belongs_to(e.name, target.name, parts=parts))


@contextmanager
def parent_locked(folder: Path) -> Iterator[None]:
    """Lock the parent folder, so that starting runs look for each other one at a time. No lock where unsupported."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        until = time.monotonic() + _PATIENCE
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise PlanError("the folder is locked by another program", file=folder, hint="try again") from None
                time.sleep(0.01)
            except OSError:
                break
        yield
    finally:
        os.close(fd)


@contextmanager
def claimed(
    target: Path, job: str, files: Sequence[str], *, resume: Resume
) -> Iterator[tuple[WorkFolder, Journal | None]]:
    """Claim the work folder of this job on `target`; also return the journal of an earlier run to resume, or None.

    Removes the folders of other jobs. Raises PlanError if another run uses the target, if parts of a job wait to be
    merged, or resume="required" and there is nothing to resume.
    """
    with ExitStack() as stack:
        work: tuple[WorkFolder, Journal | None] | None = None
        with parent_locked(target.parent):
            unmerged(target)
            for folder in taken(target, stack):
                earlier = None if folder.settle() else folder.read_journal(tensors=True)
                if (
                    resume != "never"
                    and work is None
                    and earlier is not None
                    and (earlier.job, earlier.files) == (job, tuple(files))
                ):
                    work = folder, earlier
                    sync_folder(folder.path)  # killed before it was synced
                    with suppress(FileExistsError):  # or before it was created
                        folder.files.mkdir()
                else:
                    folder.discard()
            if work is None:
                if resume == "required":
                    raise PlanError(
                        "nothing to resume: no unfinished run of this job", file=target, hint="omit --resume"
                    )
                work = WorkFolder.create(target, job, files), None
                stack.callback(work[0].close)
        yield work


def taken(target: Path, stack: ExitStack) -> list[WorkFolder]:
    """Lock the work folders of ended runs on this target until the stack ends. Raises PlanError if one is in use."""
    out = []
    for path in candidates(target, parts=False):
        if (folder := WorkFolder.take(path, target)) is not None:
            stack.callback(folder.close)
            out.append(folder)
    return out


def settle_all(target: Path) -> None:
    """Finish or undo interrupted publications at `target`. Raises PlanError if a run is using it; parts may run."""
    if not target.parent.is_dir():
        return
    parts = candidates(target, parts=True)
    if not parts and not candidates(target, parts=False):
        return
    with ExitStack() as stack, parent_locked(target.parent):
        folders = taken(target, stack)
        for path in parts:
            with suppress(PlanError):  # in use, so nothing was interrupted
                if (merging := WorkFolder.take(path, target)) is not None:
                    stack.callback(merging.close)
                    folders.append(merging)
        for folder in folders:
            if not folder.settle() and folder.read_journal() is None:  # killed while empty: nothing to resume
                folder.discard()


def unmerged(target: Path, other: Path | None = None) -> None:
    """Raise PlanError if parts of a job, other than those in the folder `other`, wait to be merged into `target`."""
    for path in candidates(target, parts=True):
        if path != other:
            raise PlanError(
                "parts of another job wait to be merged" if other is not None else "parts of a job wait to be merged",
                file=target,
                hint=f"polyquant merge {printable(target.name)}, or remove them with --discard",
            )


def held_bytes(target: Path) -> int:
    """Return the disk space of unfinished runs on this target, which the next run reuses or frees."""
    out = 0
    for path in (*candidates(target, parts=False), *candidates(target, parts=True)):
        files = path / FILES
        with suppress(FileNotFoundError, NotADirectoryError):  # another process of the job may just have finished
            if not files.is_symlink():
                out += sum(f.lstat().st_blocks * 512 for f in files.iterdir())
    return out
