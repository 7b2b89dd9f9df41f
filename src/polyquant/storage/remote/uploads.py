"""Output to s3://: every file is a multipart upload whose parts are sent while tensors are converted.

The layout is complete before any payload, so the parts are known in advance (upload_parts.py). No object is visible
until all bytes are stored; then the uploads are completed one by one: one file at once, the index and config.json of a
folder last. Uploaded parts are recorded on this machine (upload_state.py), so the same command resumes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyquant.errors import PlanError, PolyquantError, RemoteError, printable
from polyquant.storage.locations import RemotePath, forget
from polyquant.storage.remote.s3 import S3, Found, UploadGoneError
from polyquant.storage.remote.upload_parts import Assembler, FileParts, Key, file_parts, part_bytes
from polyquant.storage.remote.upload_state import UploadState
from polyquant.storage.spans import slots_by_tensor
from polyquant.storage.staging import Replaceable, resumable
from polyquant.storage.work_folder import Resume
from polyquant.types import FilePlan, Layout, Slot

__all__ = [
    "STREAMING",
    "UploadStaging",
    "file_urls",
    "publication_order",
    "refuse_existing",
    "staged_upload",
    "upload_memory",
]

STREAMING = frozenset({"s3", "s3a"})
"""Schemes with multipart uploads; output to others is written to this machine first (spooled.py)."""
_BUDGET = 64 << 20
_REQUESTS = 8
"""Requests about different files at the same time."""
_SMALL = 256
"""Bytes of a slot whose content is kept in the journal."""


def upload_memory(layout: Layout, max_memory: int | None = None) -> int:
    """Bytes for parts in memory: four parts or 64 MiB, less under a memory limit."""
    part = max((part_bytes(f.size) for f in layout.files), default=0)
    usual = max(_BUDGET, 4 * part)
    return usual if max_memory is None else min(usual, max(2 * part, max_memory // 6))


def file_urls(target: RemotePath, layout: Layout) -> list[RemotePath]:
    """The URL of each file of a layout."""
    if layout.folder:
        return [target / f.name for f in layout.files]
    return [target if len(layout.files) == 1 else target.parent / f.name for f in layout.files]


class UploadStaging:
    """Files being uploaded. `done`: tensor -> report of its step, including earlier runs."""

    def __init__(self, state: UploadState, s3: S3, layout: Layout, urls: Sequence[RemotePath], budget: int) -> None:
        self.layout, self.done = layout, dict[str, Any]()
        self._state, self._s3, self._urls = state, s3, urls
        self._files = file_parts(layout)
        self._indices = {f.name: i for i, f in enumerate(layout.files)}
        self._small: dict[str, list[tuple[int, int, str]]] = {}
        self._assembler = Assembler(self._files, self._store, budget, state.folder)

    def prepare(self) -> None:
        """Begin the uploads, or continue those of an earlier run. Raises RemoteError."""
        stored: set[Key] = set()
        if self._state.known.others is None:
            self._state.append(others=sorted(_begun(self._state, self._s3)))
            self._state.sync()
        _at_once(lambda i: stored.update(self._begin(i)), [i for i, file in enumerate(self._files) if file.streams])
        self._state.sync()
        abort_lost(self._state, self._s3)
        self.done = self._finished(stored)
        self._assembler.start(stored)
        for name in self.done:
            for i, offset, data in self._state.known.tensors[name]["small"]:
                self._assembler.write(i, offset, memoryview(bytes.fromhex(data)))

    def _begin(self, i: int) -> set[Key]:
        """Begin the upload of a file, or return the stored parts of an earlier run."""
        url, upload = self._urls[i], self._state.known.uploads.get(i)
        there = None if upload is None else self._s3.stored(url, upload)
        if there is None:
            self._state.append(begun=[i, self._s3.begin(url, self._state.known.token)])
            return set()
        ours = self._state.known.parts.get(i, {})
        return {(i, number) for number, etag in ours.items() if there.get(number) == etag}

    def _finished(self, stored: set[Key]) -> dict[str, Any]:
        """The tensors of an earlier run whose bytes are all in stored parts, or in the journal."""
        slots = slots_by_tensor(self.layout)
        lines = self._state.known.tensors
        return {
            name: line["report"]
            for name, line in lines.items()
            if name in slots
            and all(slot.spec.nbytes <= _SMALL or self._is_stored(slot, stored) for slot in slots[name])
        }

    def _is_stored(self, slot: Slot, stored: set[Key]) -> bool:
        i = self._indices[slot.file]
        numbers = self._files[i].numbers(slot.offset, slot.offset + slot.spec.nbytes)
        return all((i, number) in stored for number in numbers)

    def all_done(self) -> None:
        """Adopt the reports of a run whose publication was interrupted."""
        self.done = {name: line["report"] for name, line in self._state.known.tensors.items()}

    def _store(self, key: Key, data: bytearray) -> None:
        i, number = key
        etag = self._s3.store(self._urls[i], self._state.known.uploads[i], number, data)
        self._state.append(part=[i, number, etag])

    def write(self, tensor: str, part: str, offset: int, data: NDArray[Any]) -> None:
        """Write bytes of one part (a C-contiguous array of any dtype) at `offset` in its slot. Thread-safe."""
        slot = self.layout.slots[tensor, part]
        assert offset + data.nbytes <= slot.spec.nbytes, f"{tensor}.{part}: more bytes than planned"
        if data.nbytes:
            raw = data.reshape(-1).view(np.uint8).data
            i, at = self._indices[slot.file], slot.offset + offset
            if slot.spec.nbytes <= _SMALL:
                self._small.setdefault(tensor, []).append((i, at, raw.hex()))
            self._assembler.write(i, at, raw)

    def finish(self, tensor: str, report: Any, **_: Any) -> None:
        """Record that a tensor is complete."""
        self.done[tensor] = report
        self._state.append(tensor=tensor, report=report, small=self._small.pop(tensor, []))

    def sync(self) -> None:
        """Wait until every part is stored. Raises RemoteError."""
        self._assembler.settle()

    def publish(self, *, replace: bool) -> None:
        """Make the output visible. Raises PlanError if an object exists and replace is False, RemoteError."""
        groups = publication_order(self.layout)
        for i, file in enumerate(self._files):
            if not file.streams:
                self._state.keep(i, _content(file))
        first = [i for group in groups[1:] for i in group] if replace else []
        self._state.append(publish=groups, first=first, replace=replace)
        self._state.sync()
        publish(self._state, self._s3)

    @property
    def kept(self) -> bool:
        """True if a later run can use something of this one."""
        return any(self._state.known.parts.values())

    def close(self) -> None:
        """Stop; uploaded parts stay on the server."""
        self._assembler.close()


def _content(file: FileParts) -> bytes:
    return b"".join(bytes(file.known(number)) for number in range(1, file.count + 1))


def _rank(file: FilePlan) -> int:
    """2 for config.json, 1 for an index, else 0: the order of publication."""
    return 2 if file.name == "config.json" else int(file.name.endswith(".index.json"))


def publication_order(layout: Layout) -> list[list[int]]:
    """Groups of files in the order in which they become visible: those that readers start from are last."""
    files = range(len(layout.files))
    if not layout.folder:
        return [group for group in ([*files[1:]], [0]) if group]
    ranked = [[i for i in files if _rank(layout.files[i]) == rank] for rank in range(3)]
    return [group for group in ranked if group]


def publish(state: UploadState, s3: S3) -> None:
    """Carry out the publication in the journal, or the rest of it.

    Raises PlanError if an object exists that must not be replaced, UploadGoneError, RemoteError.
    """
    known = state.known
    objects = [(RemotePath(*_parts(url)), size, -(-size // part)) for url, size, part in known.files]
    for i in known.first:
        found = s3.found(objects[i][0])
        if found is not None and found.token != known.token:
            s3.remove(objects[i][0])

    def show(i: int) -> None:
        url, size, count = objects[i]
        ours = Found(size, known.token)
        if i in known.uploads:
            if s3.found(url) == ours:
                return
            etags = [known.parts[i][number] for number in range(1, count + 1)]
            s3.complete(url, known.uploads[i], etags, known.token, replace=known.replace)
        else:
            s3.put(url, state.kept(i), known.token, replace=known.replace)
        if (found := s3.found(url)) != ours:
            raise RemoteError(
                "another program has changed the object", file=url, expected=size, found=found and found.size
            )

    for group in known.publish or ():
        _at_once(show, group)


def _at_once(act: Callable[[int], object], files: Sequence[int]) -> None:
    """Call a function for some files, several at the same time. Raises the first error after all have ended."""
    with ThreadPoolExecutor(_REQUESTS) as pool:
        for future in [pool.submit(act, i) for i in files]:
            future.result()


def _parts(url: str) -> list[str]:
    scheme, _, rest = url.partition("//")
    return [scheme, *rest.split("/")]


def _begun(state: UploadState, s3: S3) -> set[tuple[str, str]]:
    """All unfinished uploads to our URLs."""
    ours = {url for url, *_ in state.known.files}
    prefix = RemotePath(*_parts(os.path.commonprefix(sorted(ours))))  # noqa: RUF071 - of strings
    return {(url, upload) for url, upload in s3.begun(prefix) if url in ours}


def abort_lost(state: UploadState, s3: S3) -> None:
    """Abort the uploads that we began without learning their ids, because the answer was lost or the run was killed."""
    known = state.known
    if known.others is not None:
        ours = {(known.files[i][0], upload) for i, upload in known.uploads.items()}
        for url, upload in _begun(state, s3) - ours - known.others:
            s3.abort(RemotePath(*_parts(url)), upload)


def discard(state: UploadState, s3: S3) -> None:
    """Abort the uploads in the journal, and remove the objects of its publication. Raises RemoteError."""
    known = state.known
    urls = [RemotePath(*_parts(url)) for url, *_ in known.files]
    for i in (i for group in known.publish or () for i in group):
        found = s3.found(urls[i])
        if found is not None and found.token == known.token:
            s3.remove(urls[i])
    for i, upload in known.uploads.items():
        s3.abort(urls[i], upload)
    abort_lost(state, s3)


@contextmanager
def staged_upload(
    dst: RemotePath,
    layout: Layout,
    fingerprint: str,
    *,
    budget: int,
    resume: Resume = "auto",
    replaceable: Replaceable | None = None,
    check: Callable[[], None] | None = None,
) -> Iterator[UploadStaging]:
    """Upload `layout` to `dst`, where it becomes visible when the block ends without an error.

    The arguments are those of `storage.staging.staged`; budget: bytes of memory for parts. After an error that a retry
    may overcome the uploaded parts are kept, and the error gets a note that tells so; otherwise they are removed.
    """
    urls = file_urls(dst, layout)
    files = [[str(url), f.size, part_bytes(f.size)] for url, f in zip(urls, layout.files, strict=True)]
    state, s3 = UploadState(dst), S3(dst)
    try:
        published = _claim(state, s3, fingerprint, files, resume)
        staging = UploadStaging(state, s3, layout, urls, budget)
        try:
            if published:
                staging.all_done()
                yield staging
            else:
                refuse_existing(dst, layout, urls, replaceable)
                staging.prepare()
                yield staging
                staging.sync()
                if check is not None:
                    check()
                refuse_existing(dst, layout, urls, replaceable)
                staging.publish(replace=replaceable is not None)
            state.discard()
        except BaseException as error:
            staging.close()
            _abandon(state, s3, error, keep=resume != "never" and staging.kept and resumable(error))
            raise
        finally:
            staging.close()
    finally:
        state.close()
        forget(dst if layout.folder else dst.parent)


def _claim(state: UploadState, s3: S3, job: str, files: Sequence[Sequence[Any]], resume: Resume) -> bool:
    """Continue the upload in the journal, or discard it and begin a new one.

    An interrupted publication is finished first. Returns True if it was one of this job.
    """
    known = state.known
    same = known.job == job and [tuple(f) for f in known.files] == [tuple(f) for f in files]
    published = False
    if known.publish is not None:
        try:
            publish(state, s3)
            published = True
        except (UploadGoneError, PlanError):
            discard(state, s3)
    if same and resume != "never" and (published or known.publish is None):
        return published
    if resume == "required":
        if not known.job:
            state.discard()
        raise PlanError("nothing to resume: no unfinished run of this job", file=state.target, hint="omit --resume")
    if not published and known.publish is None:
        discard(state, s3)
    state.begin(job, files)
    return False


def refuse_existing(
    dst: RemotePath, layout: Layout, urls: Sequence[RemotePath], replaceable: Replaceable | None
) -> None:
    """Raise PlanError for existing objects that must not be replaced."""
    forget(dst if layout.folder else dst.parent)
    if not layout.folder:
        for url in urls:
            if url.exists():
                _refuse_one(url, replaceable)
    elif dst.exists():
        stale = set(_refuse_one(dst, replaceable)) - {f.name for f in layout.files}
        if stale:
            raise PlanError(
                "the existing model has files that the new one does not replace", file=dst,
                found=", ".join(printable(name, 60) for name in sorted(stale)[:3]), hint="remove them yourself",
            )  # fmt: skip


def _refuse_one(url: RemotePath, replaceable: Replaceable | None) -> Sequence[str]:
    if replaceable is None:
        raise PlanError("target exists", file=url, hint="choose another name, or pass --overwrite")
    return replaceable(url)


def _abandon(state: UploadState, s3: S3, error: BaseException, *, keep: bool) -> None:
    """After an error: keep the uploaded parts for the next run, or remove them."""
    if keep:
        error.add_note("the same command resumes; --resume never discards the uploaded parts and starts over")
        return
    try:
        discard(state, s3)
    except PolyquantError as problem:
        error.add_note(f"the uploaded parts could not be removed ({problem}); the next run to this target removes them")
    else:
        with suppress(OSError):
            state.discard()
