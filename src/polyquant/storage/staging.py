"""Output that appears only when whole.

Work goes on in a staging folder beside the target (`.NAME.partial`, same file system): the files, a lock, and a journal of the
tensors done. `commit` syncs every file, then renames once. A killed run leaves the staging folder; the same job takes it up
again where the journal ends, and its result is byte-identical because offsets and bytes follow from the plan alone.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from polyquant.errors import PlanError
from polyquant.types import Layout

__all__ = ["Resume", "Staging", "refuse_target", "staged", "write_whole"]

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


def _sync_folder(path: Path) -> None:
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
            fd = self._fds[f.name]
            with _named(self.folder / f.name):
                os.ftruncate(fd, f.size)
            for offset, data in f.pieces:
                self._pwrite(f.name, data, offset)

    def _pwrite(self, file: str, data: bytes | memoryview, offset: int) -> None:
        view = memoryview(data).cast("B")
        with _named(self.folder / file):
            while view:
                n = os.pwrite(self._fds[file], view, offset)
                view, offset = view[n:], offset + n

    def write(self, tensor: str, part: str, offset: int, data: Any) -> None:
        """Bytes of one part (a C-contiguous array) at `offset` inside its slot. Safe from several threads."""
        slot = self.layout.slots[tensor, part]
        assert offset + data.nbytes <= slot.spec.nbytes, f"{tensor}.{part}: the writer was given more than was planned"
        if data.nbytes:
            self._pwrite(slot.file, memoryview(data).cast("B"), slot.offset + offset)

    def finish(self, tensor: str, report: Any) -> None:
        """Record that a tensor is complete."""
        self.done[tensor] = report
        os.write(self._journal, _line({"tensor": tensor, "report": report}))

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


def _line(entry: Mapping[str, Any]) -> bytes:
    """One line of the journal: a checksum and JSON."""
    text = json.dumps(entry).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _job(fingerprint: str) -> dict[str, Any]:
    """The journal's first line. What was written before the machine restarted may never have reached the disk: another job."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return {"job": fingerprint, "boot": boot.read_text().strip() if boot.is_file() else ""}


def _read_journal(path: Path, fingerprint: str) -> tuple[dict[str, Any], int] | None:
    """What an earlier run of the same job finished, and the bytes of journal that say so; None if there was none.

    A kill or a crash may tear the last line: from the first one whose checksum fails nothing is believed.
    """
    if not path.is_file():
        return None
    entries, good = [], 0
    for line in path.read_bytes().splitlines(keepends=True):
        text = line[9:-1]
        if line != b"%08x %s\n" % (zlib.crc32(text), text):
            break
        entries.append(json.loads(text))
        good += len(line)
    if not entries or entries[0] != _job(fingerprint):
        return None
    return {e["tensor"]: e["report"] for e in entries[1:]}, good


@contextmanager
def staged(
    dst: Path, layout: Layout, fingerprint: str, *, resume: Resume = "auto", overwrite: bool = False
) -> Iterator[Staging]:
    """Stage `layout` for `dst`; on leaving the block without an error the output appears at `dst`, whole, in one rename.

    Raises PlanError if another run holds the target, or resume="required" and there is nothing to resume.
    An error inside the block leaves the staging folder for the next run; if nothing was finished it is removed.
    """
    dst = dst.absolute()
    folder = dst.parent / f".{dst.name}.partial"
    folder.mkdir(exist_ok=True)
    lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PlanError("another run is writing this target", file=dst, hint="wait for it, or end it") from None
        journal_path = folder / ".journal"
        found = _read_journal(journal_path, fingerprint) if resume != "never" else None
        if found is None and resume == "required":
            raise PlanError(
                "nothing to resume: no unfinished run of this very job", file=dst, hint="leave out --resume"
            )
        fresh = found is None
        done, good = found or ({}, 0)
        if fresh:
            for leftover in folder.iterdir():
                if leftover.name != ".lock":
                    leftover.unlink()
        journal = os.open(journal_path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            if fresh:
                os.write(journal, _line(_job(fingerprint)))
            else:
                os.ftruncate(journal, good)
            staging = Staging(folder, layout, done, journal)
            try:
                if fresh:
                    staging.prepare()
                yield staging
                staging.sync()
            finally:
                staging.close()
        finally:
            os.close(journal)
        _publish(folder, dst, layout, overwrite=overwrite)
    except BaseException:
        _drop_if_useless(folder)
        raise
    finally:
        os.close(lock)


def _drop_if_useless(folder: Path) -> None:
    """Remove a staging folder that holds no finished tensor."""
    journal = folder / ".journal"
    if not journal.is_file() or journal.read_bytes().count(b"\n") < 2:
        shutil.rmtree(folder, ignore_errors=True)


def _publish(folder: Path, dst: Path, layout: Layout, *, overwrite: bool) -> None:
    """One rename makes the output visible."""
    (folder / ".journal").unlink()
    if os.path.lexists(dst) and not overwrite:
        raise PlanError("target appeared while we worked", file=dst, hint="choose another name, or pass --overwrite")
    if layout.folder:
        _swap_in(folder, dst)
    elif dst.is_dir() and not dst.is_symlink():
        raise PlanError("target is a folder; this format is one file", file=dst, hint="choose another name")
    else:
        (folder / layout.files[0].name).replace(dst)
        shutil.rmtree(folder)
    _sync_folder(dst.parent)


def _swap_in(folder: Path, dst: Path) -> None:
    """Rename a finished folder to its name; an old target steps aside first and goes only after."""
    aside = dst.parent / f".{dst.name}.replaced"
    (folder / ".lock").unlink()
    _sync_folder(folder)
    if os.path.lexists(dst):
        dst.rename(aside)
    folder.rename(dst)
    if aside.is_dir() and not aside.is_symlink():
        shutil.rmtree(aside)
    elif os.path.lexists(aside):
        aside.unlink()


def write_whole(path: Path, data: bytes) -> None:
    """A small file that appears complete or not at all."""
    temporary = path.with_name(f".{path.name}.partial")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        os.write(fd, data)
        os.fsync(fd)
    finally:
        os.close(fd)
    temporary.replace(path)
