"""Copy the parts of a job that ran on other machines, without a shared folder, into the folder next to the target.

Folders of other machines are untrusted: sizes, offsets and names are checked, and every block against its checksum.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from polyquant.errors import InputError, PlanError, printable
from polyquant.ops.checksum import crc32
from polyquant.storage import journal as journals
from polyquant.storage.parts import Job, Receipt, between_blocks, joined, receipt
from polyquant.storage.renames import named, sync_folder
from polyquant.storage.work_folder import FILES, inside_work_folder, part_name

__all__ = ["copy_parts"]

_AT_ONCE = 1 << 24

Files: TypeAlias = Sequence[tuple[Path, int]]
"""Path and descriptor of each file of a job."""
OnProgress: TypeAlias = Callable[[int, int, str], None]
"""Called with bytes done, bytes in total, part."""


def copy_parts(target: Path, sources: Sequence[Path], *, on_progress: OnProgress | None = None) -> None:
    """Copy every complete part in these folders that the target's own folder lacks. sources: folders of parts, or
    folders that contain one. on_progress: called with (bytes done, bytes in total, part).

    Raises PlanError if they belong to different jobs or contradict each other, InputError for damaged bytes, OSError.
    """
    folders = [(path, _job_in(path)) for source in sources for path in _folders(source)]
    job = folders[0][1]
    for path, other in folders:
        if _common(other) != _common(job):
            raise PlanError("its parts belong to another job than those of the first folder", file=path,
                            expected=f"{printable(job.format)}, {job.count} parts, {job.name[:8]}",
                            found=f"{printable(other.format)}, {other.count} parts, {other.name[:8]}")  # fmt: skip
    with joined(target, job) as work:
        try:
            _copy_into(work.path, folders, job, on_progress)
        except BaseException as error:
            error.add_note(f"the parts are in '{printable(work.path)}'")
            raise


def _copy_into(own: Path, folders: Sequence[tuple[Path, Job]], job: Job, on_progress: OnProgress | None) -> None:
    """Copy parts into the folder `own`: all bytes first, then the receipts."""
    chosen = _chosen(own, folders, job)
    total = sum(b.nbytes for _, r in chosen.values() for d in r.done.values() for b in d.blocks)
    done = 0
    with _files(own / FILES, job, os.O_RDWR | os.O_CREAT) as out:
        for (path, fd), size in zip(out, job.sizes, strict=True):
            with named(path):
                os.ftruncate(fd, size)
        for part, (folder, found) in chosen.items():
            with _files(folder / FILES, job, os.O_RDONLY) as into:
                for tensor, block in ((t, b) for t, finished in found.done.items() for b in finished.blocks):
                    if _copy(into, out, block) != block.crc:
                        raise InputError(f"does not hold what part {part} wrote", file=folder, tensor=tensor,
                                         hint="copy the folder again")  # fmt: skip
                    done += block.nbytes
                    if on_progress is not None:
                        on_progress(done, total, part_name(part, job.count))
        parts = range(1, job.count + 1)
        mine = {part: r for part in parts if (r := receipt(own, part, job)) is not None and r.complete}
        receipts = [*mine.values(), *(r for _, r in chosen.values())]
        if chosen and len(receipts) == job.count:
            _copy_headers(next(iter(chosen.values()))[0], receipts, job, out)
        for path, fd in out:
            with named(path):
                os.fsync(fd)
    for part, (folder, _) in chosen.items():
        _copy_receipt(folder / part_name(part, job.count), own / part_name(part, job.count))
    sync_folder(own)
    sync_folder(own.parent)


def _common(job: Job) -> Job:
    """The properties shared by all parts of a job, regardless of the machine."""
    return replace(job, command="")


def _folders(source: Path) -> list[Path]:
    """The folders of parts in a folder, or the folder itself. Raises PlanError if there is none."""
    if not source.is_dir():
        raise PlanError("is not a folder", file=source)
    if (source / journals.NAME).is_file():
        return [source]
    found = [p for p in sorted(source.iterdir()) if inside_work_folder(Path(p.name)) and (p / journals.NAME).is_file()]
    if not found:
        raise PlanError("contains no parts", file=source, hint="copy the folder .NAME.polyquant-parts-... here")
    return found


def _job_in(path: Path) -> Job:
    fd = os.open(path / journals.NAME, os.O_RDONLY | os.O_NONBLOCK)
    try:
        journal = journals.read(fd, tensors=False)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        journal = None
    finally:
        os.close(fd)
    job = Job.of(journal) if journal is not None else None
    if job is None:
        raise PlanError("its parts have no valid journal", file=path)
    return job


def _chosen(own: Path, folders: Sequence[tuple[Path, Job]], job: Job) -> dict[int, tuple[Path, Receipt]]:
    """The folder and receipt of every complete part that is missing here. Raises PlanError for a contradiction."""
    out: dict[int, tuple[Path, Receipt]] = {}
    for part in range(1, job.count + 1):
        complete = [(p, r) for p in (own, *(f for f, _ in folders)) if (r := receipt(p, part, job)) and r.complete]
        for path, other in complete[1:]:
            first = complete[0][1]
            for tensor, done in other.done.items():
                if tensor not in first.done or sorted(done.blocks, key=_place) != sorted(
                    first.done[tensor].blocks, key=_place
                ):
                    raise PlanError(
                        f"part {part} was made twice with different results", file=path, tensor=tensor,
                        expected=f"what {printable(complete[0][0])} holds", hint="omit one of the two folders",
                    )  # fmt: skip
        if complete and complete[0][0] != own:
            out[part] = complete[0]
    return out


def _place(block: journals.Block) -> tuple[int, int]:
    return block.file, block.offset


@contextmanager
def _files(folder: Path, job: Job, flags: int) -> Iterator[Files]:
    """A job's files in a folder. Raises OSError, InputError for a file of a different size."""
    with ExitStack() as stack:
        files = []
        for name, size in zip(job.files, job.sizes, strict=True):
            path = folder / name
            if flags & os.O_CREAT and "/" in name:
                path.parent.mkdir(exist_ok=True)
            fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
            stack.callback(os.close, fd)
            if not flags & os.O_CREAT and (found := os.fstat(fd).st_size) != size:
                raise InputError("is not the whole file", file=path, expected=f"{size} bytes", found=found,
                                 hint="copy the folder again")  # fmt: skip
            files.append((path, fd))
        yield files


def _copy_headers(source: Path, receipts: Sequence[Receipt], job: Job, out: Files) -> None:
    """Copy the bytes that no part writes: headers, which every part's folder has. Raises InputError if damaged."""
    crc = 0
    with _files(source / FILES, job, os.O_RDONLY) as into:
        for file, start, stop in between_blocks(receipts, job):
            crc = _copy(into, out, journals.Block(file, start, stop - start, 0), crc)
    if crc != job.headers:
        raise InputError("its headers are damaged", file=source, hint="copy the folder again")


def _copy(source: Files, target: Files, block: journals.Block, crc: int = 0) -> int:
    """Copy the bytes of a block; return their CRC-32, continued from `crc`."""
    (path, into), (own, out) = source[block.file], target[block.file]
    offset, end = block.offset, block.offset + block.nbytes
    while offset < end:
        with named(path):
            data = os.pread(into, min(_AT_ONCE, end - offset), offset)
        if not data:
            break
        view = memoryview(data)
        with named(own):
            while view:
                view = view[os.pwrite(out, view, offset + len(data) - len(view)) :]
        crc, offset = crc32(data, crc), offset + len(data)
    return crc


def _copy_receipt(source: Path, target: Path) -> None:
    """Copy a receipt, which appears only when complete."""
    fd = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        data = b"".join(journals.lines(fd))
    finally:
        os.close(fd)
    out = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    try:
        with named(target):
            view = memoryview(data)
            while view:
                view = view[os.write(out, view) :]
            os.fsync(out)
    finally:
        os.close(out)
