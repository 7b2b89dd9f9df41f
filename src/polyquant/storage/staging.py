"""Output that appears only when whole.

Work goes on in a staging folder beside the target (`.NAME.partial`, same file system): the files, a lock, and a journal of the
tensors done. `commit` syncs every file, then renames once. A killed run leaves the staging folder; the same job takes it up
again where the journal ends, and its result is byte-identical because offsets and bytes follow from the plan alone.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from polyquant.errors import PlanError
from polyquant.storage import journal as journals
from polyquant.types import Layout

__all__ = ["Resume", "Staging", "refuse_target", "staged", "sync_folder"]

Resume = Literal["auto", "required", "never"]


def refuse_target(dst: Path, source: Path, *, overwrite: bool) -> None:
    """PlanError if writing `dst` would destroy something: the source, a folder around it, or a target nobody offered."""
    real, origin = Path(os.path.realpath(dst)), Path(os.path.realpath(source))  # never fails, on no loop of links
    if real == origin or origin in real.parents or real in origin.parents:
        raise PlanError("target is, holds or lies inside the source", file=dst, hint="choose another target")
    if os.path.lexists(dst) and not overwrite:
        raise PlanError("target exists", file=dst, hint="choose another name, or pass --overwrite")
    if not dst.absolute().parent.is_dir():
        raise PlanError("the target's folder does not exist", file=dst, hint=f"mkdir -p {dst.absolute().parent}")


def sync_folder(path: Path) -> None:
    """Make renames inside a folder last."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """An error of the disk says which file it struck: descriptors have no names."""
    try:
        yield
    except OSError as e:
        e.filename = str(path)
        raise


class Staging:
    """Files being written. `done` holds the journal: tensor -> what the step reported."""

    def __init__(self, folder: Path, layout: Layout, done: dict[str, Any], journal: int) -> None:
        self.folder, self.layout, self.done = folder, layout, done
        self._journal = journal
        self._fds = {f.name: os.open(folder / f.name, os.O_RDWR | os.O_CREAT, 0o666) for f in layout.files}

    def prepare(self) -> None:
        """Give every file its exact size and the bytes that the plan already knows. Raises OSError if the disk is full."""
        for f in self.layout.files:
            with _named(self.folder / f.name):
                os.ftruncate(self._fds[f.name], f.size)
            for offset, data in f.pieces:
                self._pwrite(f.name, data, offset)

    def _pwrite(self, file: str, data: bytes | memoryview, offset: int) -> None:
        view = memoryview(data).cast("B")
        with _named(self.folder / file):
            while view:
                n = os.pwrite(self._fds[file], view, offset)
                view, offset = view[n:], offset + n

    def write(self, tensor: str, part: str, offset: int, data: NDArray[Any]) -> None:
        """Bytes of one part (a C-contiguous array of any dtype) at `offset` inside its slot. Safe from several threads."""
        slot = self.layout.slots[tensor, part]
        assert offset + data.nbytes <= slot.spec.nbytes, f"{tensor}.{part}: the writer was given more than was planned"
        if data.nbytes:
            self._pwrite(slot.file, data.reshape(-1).view(np.uint8).data, slot.offset + offset)

    def finish(self, tensor: str, report: Any) -> None:
        """Record that a tensor is complete."""
        self.done[tensor] = report
        os.write(self._journal, journals.entry({"tensor": tensor, "report": report}))

    def sync(self) -> None:
        """Force every file to the disk."""
        for name, fd in self._fds.items():
            with _named(self.folder / name):
                os.fsync(fd)

    def close(self) -> None:
        """Let go of the files; what was written stays in the staging folder."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds = {}


@contextmanager
def staged(
    dst: Path, layout: Layout, fingerprint: str, *, resume: Resume = "auto", overwrite: bool = False
) -> Iterator[Staging]:
    """Stage `layout` for `dst`; on leaving the block without an error the output appears at `dst`, whole, in one rename.

    Raises PlanError if another run holds the target, or resume="required" and there is nothing to resume.
    An error inside the block leaves the staging folder for the next run; if nothing was finished it is removed.
    """
    dst = dst.absolute()
    if not layout.folder and dst.is_dir() and not dst.is_symlink():
        raise PlanError("target is a folder; this format is one file", file=dst, hint="choose another name")
    folder = dst.parent / f".{dst.name}.partial"
    folder.mkdir(exist_ok=True)
    with _locked(folder, dst):
        published = False
        try:
            found = journals.read_journal(folder, fingerprint) if resume != "never" else None
            if found is None and resume == "required":
                raise PlanError("nothing to resume: no unfinished run of this job", file=dst, hint="leave out --resume")
            if found is None:
                _empty(folder)
            done, good = found or ({}, None)
            journal = journals.open_journal(folder, fingerprint, good)
            try:
                with closing(Staging(folder, layout, done, journal)) as staging:
                    staging.prepare()
                    yield staging
                    staging.sync()
            finally:
                os.close(journal)
            _publish(folder, dst, layout, overwrite=overwrite)
            published = True
        finally:
            if not published:
                _drop_if_useless(folder)


@contextmanager
def _locked(folder: Path, dst: Path) -> Iterator[None]:
    """Hold the staging folder alone. Raises PlanError if another run has it."""
    taken = PlanError("another run is writing this target", file=dst, hint="wait for it, or end it")
    lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            same = os.path.samestat(os.fstat(lock), (folder / ".lock").stat())
        except (BlockingIOError, FileNotFoundError):
            raise taken from None
        if not same:
            raise taken  # the run that had it finished between our two looks
        yield
    finally:
        os.close(lock)


def _empty(folder: Path) -> None:
    for leftover in folder.iterdir():
        if leftover.name != ".lock":
            leftover.unlink()


def _drop_if_useless(folder: Path) -> None:
    """Remove a staging folder that holds no finished tensor."""
    journal = folder / journals.NAME
    if not journal.is_file() or journal.read_bytes().count(b"\n") < 2:
        shutil.rmtree(folder, ignore_errors=True)


def _publish(folder: Path, dst: Path, layout: Layout, *, overwrite: bool) -> None:
    """One rename makes the output visible; of several files (a split model) the first comes last, since readers start from it."""
    targets = [dst] if layout.folder or len(layout.files) == 1 else [dst.parent / f.name for f in layout.files]
    if not overwrite and (taken := next((t for t in targets if os.path.lexists(t)), None)):
        raise PlanError("target exists", file=taken, hint="choose another name, or pass --overwrite")
    (folder / journals.NAME).unlink()
    if layout.folder:
        _swap_in(folder, dst)
    else:
        for file, target in reversed(list(zip(layout.files, targets, strict=True))):
            (folder / file.name).replace(target)
        shutil.rmtree(folder)
    sync_folder(dst.parent)


def _swap_in(folder: Path, dst: Path) -> None:
    """Rename a finished folder to its name; an old target steps aside first and goes only after."""
    aside = dst.parent / f".{dst.name}.replaced"
    (folder / ".lock").unlink()
    sync_folder(folder)
    if os.path.lexists(dst):
        dst.rename(aside)
    folder.rename(dst)
    if aside.is_dir() and not aside.is_symlink():
        shutil.rmtree(aside)
    elif os.path.lexists(aside):
        aside.unlink()
