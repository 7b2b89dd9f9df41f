"""Atomic output: files appear at the target only when complete.

Files are written in a work folder next to the target (storage/work_folder.py), on the same file system. All sizes,
headers and offsets are known in advance, so threads write row blocks in any order. At the end every file is synced and
renamed. A killed run leaves the work folder; the same job resumes it and checks the bytes of the tensors that the
journal lists as complete. The result is byte-identical because offsets and bytes depend only on the plan.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from polyquant.errors import PlanError, PolyquantError, RemoteError
from polyquant.ops.checksum import crc32
from polyquant.storage.claims import claimed
from polyquant.storage.journal import Block, Done
from polyquant.storage.phases import phase
from polyquant.storage.renames import named, sync_folder
from polyquant.storage.spans import gaps, slots_by_tensor, spans_by_file
from polyquant.storage.work_folder import FILES, Resume, WorkFolder
from polyquant.types import Layout, Slot

__all__ = ["ForeignFileError", "Replaceable", "Resume", "Sink", "Staging", "crc_of", "publish", "resumable", "staged"]

Replaceable = Callable[[Path], Sequence[str]]
"""Existing target -> the files inside it that may be removed ([] for a file).

Raises PlanError if it must not be replaced.
"""

_CHECK_AT_ONCE = 1 << 24
_WRITE_AT_ONCE = 1 << 30  # macOS refuses 2 GiB and more, Linux writes less
_SYNC_EVERY = 1 << 26
"""Bytes after which they are sent to disk, during the conversion: less is left for the sync at the end."""


class ForeignFileError(Exception):
    """A file in the work folder is not the one written by this program."""


class Journaled(Protocol):
    """A folder for files, and the journal of their tensors."""

    files: Path

    def append(self, **values: Any) -> None:
        """Append one line to the journal. Raises OSError."""


class Sink(Protocol):
    """Takes the bytes of tensors: `Staging`, and UploadStaging of storage/remote/uploads.py."""

    done: dict[str, Any]

    def write(self, tensor: str, part: str, offset: int, data: NDArray[Any]) -> None:
        """Write bytes of one part (a C-contiguous array of any dtype) at `offset` in its slot. Thread-safe."""

    def finish(self, tensor: str, report: Any, **more: Any) -> None:
        """Record that a tensor is complete."""


class Staging:
    """Files being written.

    `done`: complete tensor -> report of its step if an earlier run wrote it, else None. `folder`: the folder of the
    files.
    """

    def __init__(self, work: Journaled, layout: Layout) -> None:
        self.folder, self.layout = work.files, layout
        self.done: dict[str, Any] = {}
        self._work = work
        self._blocks: dict[str, list[Block]] = {}
        self._beside: ThreadPoolExecutor | None = None
        self._syncing: Future[None] | None = None
        self._unsynced, self._counting = 0, threading.Lock()
        self._fds: dict[str, int] = {}
        self._folders: dict[str, int] = {}
        self._paths = {f.name: self.folder / f.name for f in layout.files}  # named in errors
        self._indices = {f.name: i for i, f in enumerate(layout.files)}
        try:
            self._inside = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except NotADirectoryError as e:
            raise ForeignFileError(self.folder.name) from e
        try:
            for f in layout.files:
                self._fds[f.name] = self._open(f.name)
        except BaseException:
            self.close()
            raise

    def _open(self, name: str) -> int:
        """Open our file: a new one, or a regular file without other hard links. Raises ForeignFileError, OSError."""
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK
        inside, plain = self._place(name)
        with named(self._paths[name]):
            try:
                return os.open(plain, flags | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=inside)
            except FileExistsError:
                pass
        try:
            fd = os.open(plain, flags, dir_fd=inside)
        except OSError as e:
            raise ForeignFileError(name) from e
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
            os.close(fd)
            raise ForeignFileError(name)
        return fd

    def _place(self, name: str) -> tuple[int, str]:
        """Return (folder descriptor, name) of a file, creating a missing subfolder of the output.

        Raises ForeignFileError, OSError.
        """
        folder, _, plain = name.rpartition("/")
        if not folder:
            return self._inside, plain
        if folder not in self._folders:
            with named(self.folder / folder), suppress(FileExistsError):
                os.mkdir(folder, dir_fd=self._inside)
            try:
                flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
                self._folders[folder] = os.open(folder, flags, dir_fd=self._inside)
            except OSError as e:
                raise ForeignFileError(folder) from e
        return self._folders[folder], plain

    def prepare(self, done: Mapping[str, Done] | None = None) -> None:
        """Give every file its exact size and write the bytes already known. Raises OSError if the disk is full.

        done: tensors completed by an earlier run. Those whose bytes have changed since are left out of `self.done`.
        """
        spans = {} if done is None else spans_by_file(self.layout)
        for f in self.layout.files:
            with named(self._paths[f.name]):
                os.ftruncate(self._fds[f.name], f.size)
            for offset, data in f.pieces:
                self._pwrite(f.name, data, offset)
            if done is not None:  # zeros again between the pieces and tensors
                pieces = [(offset, offset + len(data)) for offset, data in f.pieces]
                for start, stop in gaps([*pieces, *spans[f.name]], f.size):
                    self._pwrite(f.name, bytes(stop - start), start)
        slots = slots_by_tensor(self.layout) if done else {}
        self.done = {name: d.report for name, d in (done or {}).items() if self._intact(slots.get(name, ()), d)}

    def _intact(self, slots: Sequence[Slot], done: Done) -> bool:
        """Return True if these slots of a tensor, or the rows done, still hold the bytes that were written."""
        start, stop, rows = done.rows or (0, 1, 1)
        missing = sum(slot.spec.nbytes * (stop - start) // max(1, rows) for slot in slots)
        for block in done.blocks:
            file = self.layout.files[block.file].name if 0 <= block.file < len(self.layout.files) else None
            end = block.offset + block.nbytes
            if file is None or not any(
                s.file == file and s.offset <= block.offset and end <= s.offset + s.spec.nbytes for s in slots
            ):
                return False
            if crc_of(self._fds[file], block) != block.crc:
                return False
            missing -= block.nbytes
        return missing == 0

    def _pwrite(self, file: str, data: bytes | memoryview, offset: int) -> None:
        view = memoryview(data).cast("B")
        with named(self._paths[file]):
            while view:
                n = os.pwrite(self._fds[file], view[:_WRITE_AT_ONCE], offset)
                view, offset = view[n:], offset + n

    def write(self, tensor: str, part: str, offset: int, data: NDArray[Any]) -> None:
        """Write bytes of one part (a C-contiguous array of any dtype) at `offset` in its slot. Thread-safe."""
        slot = self.layout.slots[tensor, part]
        assert offset + data.nbytes <= slot.spec.nbytes, f"{tensor}.{part}: more bytes than planned"
        if data.nbytes:
            raw = data.reshape(-1).view(np.uint8).data
            self._pwrite(slot.file, raw, slot.offset + offset)
            with phase("checksum", data.nbytes):
                crc = crc32(raw)
            block = Block(self._indices[slot.file], slot.offset + offset, data.nbytes, crc)
            self._blocks.setdefault(tensor, []).append(block)
            self._sync_beside(slot.file, data.nbytes)

    def _sync_beside(self, file: str, written: int) -> None:
        """Send a file's bytes to disk in another thread, one at a time. Raises OSError of an earlier one."""
        with self._counting:
            self._unsynced += written
            if self._unsynced < _SYNC_EVERY or not (self._syncing is None or self._syncing.done()):
                return
            if self._syncing is not None:
                self._syncing.result()  # an error of the disk is reported only once
            self._beside = self._beside or ThreadPoolExecutor(1)
            self._syncing, self._unsynced = self._beside.submit(self._sync_data, file), 0

    def _sync_data(self, file: str) -> None:
        sync = getattr(os, "fdatasync", os.fsync)  # macOS has only fsync
        with named(self._paths[file]):
            sync(self._fds[file])

    def finish(self, tensor: str, report: Any, **more: Any) -> None:
        """Record that a tensor is complete. more: further values of its line (storage/journal.py)."""
        blocks = [[b.file, b.offset, b.nbytes, b.crc] for b in self._blocks.pop(tensor, [])]
        self.record(tensor, report, blocks, **more)

    def record(self, tensor: str, report: Any, blocks: Sequence[Sequence[int]], **more: Any) -> None:
        """Record that a tensor is complete, whose blocks (storage/journal.py) another process has written."""
        self.done[tensor] = None  # its report is on disk; 70,000 of them take 140 MB
        with phase("journal"):
            self._work.append(tensor=tensor, report=report, blocks=blocks, **more)

    def flush(self) -> None:
        """Sync the bytes written so far to disk. Raises OSError."""
        if self._syncing is not None:
            self._syncing.result()
        for f in self.layout.files:
            self._sync_data(f.name)

    def sync(self) -> None:
        """Sync every file to disk. Raises PlanError if one was replaced or truncated since it was opened."""
        if self._syncing is not None:
            self._syncing.result()
        for f in self.layout.files:
            with named(self._paths[f.name]):
                os.fsync(self._fds[f.name])
                ours = os.fstat(self._fds[f.name])
                inside, plain = self._place(f.name)
                there = os.stat(plain, dir_fd=inside, follow_symlinks=False)
            if not os.path.samestat(ours, there) or ours.st_size != f.size:
                raise PlanError("another program changed it during writing", file=self.folder / f.name)
        ours_by_name = {f.name for f in self.layout.files} | set(self._folders)
        for prefix, inside in (*((f"{folder}/", fd) for folder, fd in self._folders.items()), ("", self._inside)):
            with os.scandir(inside) as found:
                foreign = sorted({prefix + entry.name for entry in found} - ours_by_name)
            if foreign:
                raise PlanError("another program added a file to the output", file=self.folder / foreign[0])
            with named(self.folder / prefix):
                os.fsync(inside)

    def close(self) -> None:
        """Close the files; they stay in the work folder."""
        if self._beside is not None:
            self._beside.shutdown()
        for fd in (*self._fds.values(), *self._folders.values(), self._inside):
            os.close(fd)
        self._fds, self._folders = {}, {}


def crc_of(fd: int, block: Block, crc: int = 0) -> int:
    """The CRC-32 of a block's bytes in the file with this descriptor, continued from `crc`."""
    end = block.offset + block.nbytes
    for at in range(block.offset, end, _CHECK_AT_ONCE):
        crc = crc32(os.pread(fd, min(_CHECK_AT_ONCE, end - at), at), crc)
    return crc


@contextmanager
def staged(
    dst: Path,
    layout: Layout,
    fingerprint: str,
    *,
    resume: Resume = "auto",
    replaceable: Replaceable | None = None,
    check: Callable[[], None] | None = None,
) -> Iterator[Staging]:
    """Stage `layout` for `dst`; the complete output appears at `dst` when the block ends without an error.

    replaceable: returns the files of an existing target that may be removed (--overwrite); None: an existing target is
    refused. check: called when all bytes are written and nothing is published yet; may raise. Raises PlanError if
    another run uses the target, or resume="required" and there is nothing to resume. After an error that a retry may
    overcome (an interrupt, a full disk) the work folder is kept and the error gets a note that tells so; otherwise it
    is removed.
    """
    dst = dst.absolute()
    if not layout.folder and dst.is_dir() and not dst.is_symlink():
        raise PlanError("target is a folder; this format is one file", file=dst, hint="choose another name")
    if layout.folder and os.path.lexists(dst) and not dst.is_dir():
        raise PlanError("target is a file; this format is a folder", file=dst, hint="choose another name")
    with _opened(dst, layout, fingerprint, resume) as (work, staging):
        try:
            with closing(staging):
                yield staging
                with phase("sync", sum(file.size for file in layout.files)):
                    staging.sync()
            if check is not None:
                check()
            publish(work, dst, [f.name for f in layout.files], folder=layout.folder, replaceable=replaceable)
        except BaseException as error:
            work.abandon(error, resumable=bool(staging.done) and resume != "never" and resumable(error))
            raise


@contextmanager
def _opened(dst: Path, layout: Layout, fingerprint: str, resume: Resume) -> Iterator[tuple[WorkFolder, Staging]]:
    """Open the work folder and its files: an earlier run's if all its files are still ours, else a new one."""
    names = [f.name for f in layout.files]
    try:
        with claimed(dst, fingerprint, names, resume=resume) as (work, found):
            try:
                staging = Staging(work, layout)
                try:
                    staging.prepare(found.done if found is not None else None)
                except BaseException:
                    staging.close()
                    raise
            except ForeignFileError:
                raise
            except BaseException as error:
                work.abandon(error, resumable=found is not None and bool(found.done))
                raise
            yield work, staging
        return
    except ForeignFileError as problem:
        if resume != "auto":
            raise PlanError(
                "cannot resume: the work folder contains a file that polyquant did not write", file=dst, found=problem
            ) from None
    with _opened(dst, layout, fingerprint, "never") as opened:
        yield opened


def resumable(error: BaseException) -> bool:
    """Return False if a retry would fail the same way, because the request or the source is wrong."""
    return (
        not isinstance(error, PolyquantError) or isinstance(error, RemoteError) or isinstance(error.__cause__, OSError)
    )


def publish(
    work: WorkFolder, dst: Path, names: Sequence[str], *, folder: bool, replaceable: Replaceable | None
) -> None:  # fmt: skip
    """Make the files of a work folder visible at `dst`: a folder, one file, or the files of a split model next to it.

    replaceable: see `staged`. Raises PlanError if a target exists, OSError.
    """
    if folder:
        moves = [(FILES, dst)]
    elif len(names) == 1:
        moves = [(f"{FILES}/{names[0]}", dst)]
    else:
        moves = [(f"{FILES}/{name}", dst.parent / name) for name in names]
    old: dict[str, Sequence[str]] = {}
    for _, target in moves:
        if os.path.lexists(target):
            if replaceable is None:
                raise PlanError("target exists", file=target, hint="choose another name, or pass --overwrite")
            old[target.name] = replaceable(target)
    sync_folder(work.path)
    work.publish(moves, old)
