"""Add blobs to a store: each is written to a work folder next to them, hashed meanwhile, and renamed when complete.

A blob that the store has is used after its bytes were compared with its digest, and never replaced. After a kill the
store has only complete blobs; the next run of the same job removes the work folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from polyquant.errors import InputError, PlanError
from polyquant.storage.claims import claimed
from polyquant.storage.locations import is_remote
from polyquant.storage.pieces import Piece, Span, copy_hashed, length
from polyquant.storage.renames import named, rename_new, sync_folder
from polyquant.storage.source import Source, refuse_changed
from polyquant.storage.stores.manifests import Descriptor, file_digest
from polyquant.storage.work_folder import WorkFolder

__all__ = ["Added", "Blobs", "adding", "digest_of"]

_CLONE = 0x40049409
"""FICLONE of linux/fs.h: share the bytes of a file until one of the two is changed."""


def digest_of(data: bytes) -> str:
    """Return the digest of bytes, "sha256:HEX"."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


class Added:
    """One blob of a job. how: "copied", "reused", "linked" (a hard link) or "cloned" (shared until changed)."""

    def __init__(self, digest: str, nbytes: int, how: str) -> None:
        self.digest, self.nbytes, self.how = digest, nbytes, how

    def descriptor(self, media_type: str, annotations: dict[str, str] | None = None) -> Descriptor:
        """Return the descriptor of this blob."""
        return Descriptor(media_type, self.digest, self.nbytes, annotations or {})


class Blobs:
    """The blobs of one job, in its work folder until `publish`. prefix: of their names, before the digest."""

    def __init__(self, work: WorkFolder, folder: Path, prefix: str, on_bytes: Callable[[int], None]) -> None:
        self._work, self._folder, self._prefix, self._on_bytes = work, folder, prefix, on_bytes
        self._staged: dict[str, Path] = {}
        self._count = 0

    def add_bytes(self, data: bytes) -> Added:
        """Add a small blob. Raises InputError, OSError."""
        return self._add([data], hashlib.sha256(data).hexdigest())

    def add(self, pieces: Sequence[Piece], *, link: bool = False) -> Added:
        """Add a blob of these bytes. link: share the bytes of a file on the same file system instead of copying them.

        Raises InputError if the source changes meanwhile, or the store has a damaged blob of this digest; OSError.
        """
        known = self._same_size(length(pieces))
        return self._add(pieces, copy_hashed(pieces, None) if known else None, link=link)

    def _add(self, pieces: Sequence[Piece], digest: str | None, *, link: bool = False) -> Added:
        nbytes = length(pieces)
        if digest is not None and (digest in self._staged or self._exists(digest, nbytes)):
            self._on_bytes(nbytes)
            return Added(f"sha256:{digest}", nbytes, "reused")
        staged = self._work.files / str(self._count)
        self._count += 1
        whole = pieces[0] if len(pieces) == 1 and isinstance(pieces[0], Span) else None
        how = _share(whole, staged) if link and whole is not None else None
        if how is None or whole is None:
            how, digest = "copied", self._written(pieces, staged)
        else:
            digest = self._hashed(whole, staged)
        if digest in self._staged or self._exists(digest, nbytes):
            staged.unlink()
            return Added(f"sha256:{digest}", nbytes, "reused")
        self._staged[digest] = staged
        return Added(f"sha256:{digest}", nbytes, how)

    def _written(self, pieces: Sequence[Piece], staged: Path) -> str:
        with named(staged):
            fd = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        before = {p.source.path: p.source.state() for p in pieces if isinstance(p, Span)}
        try:
            with named(staged):
                digest = copy_hashed(pieces, fd, self._on_bytes)
                os.fsync(fd)
        finally:
            os.close(fd)
        refuse_changed(before)
        return digest

    def _hashed(self, span: Span, staged: Path) -> str:
        """Hash the shared bytes."""
        source = Source(staged)
        before = source.state()
        try:
            digest = copy_hashed([Span(source, 0, source.size)], None, self._on_bytes)
            with named(staged):
                os.fsync(source.fileno())
            if source.state() != before or source.size != span.nbytes:
                raise InputError("changed while it was read", file=span.source.path)
        finally:
            source.close()
        return digest

    def _path(self, digest: str) -> Path:
        return self._folder / f"{self._prefix}{digest}"

    def _same_size(self, nbytes: int) -> bool:
        """Return True if the store has a blob of this size: then hashing first may save a copy."""
        with os.scandir(self._folder) as entries:
            for entry in entries:
                with suppress(OSError):
                    if entry.is_file(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_size == nbytes:
                        return True
        return False

    def _exists(self, digest: str, nbytes: int) -> bool:
        """Return True if the store has the blob. Raises InputError if its bytes do not have its digest."""
        path = self._path(digest)
        if not os.path.lexists(path):
            return False
        problem = None
        if path.is_symlink() or not path.is_file():
            problem = "not a regular file"
        else:
            source = Source(path)
            if source.size != nbytes:
                problem = f"{source.size} bytes instead of {nbytes}"
            elif file_digest(source) != digest:
                problem = "other bytes"
            source.close()
        if problem is not None:
            raise InputError(
                "a blob of this store does not have the digest of its name", file=path, found=problem,
                hint="the store is damaged: remove this file, then run the command again",
            )  # fmt: skip
        return True

    def publish(self) -> None:
        """Rename the complete blobs to their digests. Raises OSError."""
        for digest, staged in self._staged.items():
            try:
                rename_new(staged, self._path(digest))
            except FileExistsError:  # another program added it meanwhile
                self._exists(digest, staged.stat().st_size)
                staged.unlink()
        self._staged.clear()
        sync_folder(self._folder)


def _share(span: Span, staged: Path) -> str | None:
    """Make `staged` share the bytes of a whole local file: "cloned", "linked", or None if the file system cannot."""
    source = span.source
    if span.start or span.nbytes != source.size or is_remote(source.path):
        return None
    try:
        fd = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            fcntl.ioctl(fd, _CLONE, source.fileno())
            return "cloned"
        except OSError:  # the file system does not share bytes
            staged.unlink()
        finally:
            os.close(fd)
        real = source.path.resolve(strict=True)
        os.link(real, staged, follow_symlinks=False)
        if os.path.samestat(staged.lstat(), os.fstat(source.fileno())):
            return "linked"
        staged.unlink()
    except OSError:
        with suppress(OSError):
            staged.unlink()
    return None


@contextmanager
def adding(
    folder: Path, job: str, count: int, *, prefix: str, on_bytes: Callable[[int], None] = lambda n: None
) -> Iterator[Blobs]:
    """Claim a work folder for at most `count` new blobs of a job, and remove it at the end.

    folder: of the blobs. job: names the work folder, so that the same job removes what a killed run left. Raises
    PlanError if another run of this job is active.
    """
    with claimed(folder / job, "pack", [str(i) for i in range(count)], resume="never") as (work, _):
        try:
            yield Blobs(work, folder, prefix, on_bytes)
        except BaseException as error:
            work.abandon(error, resumable=False)
            raise
        work.discard()
        if os.path.lexists(work.path):
            raise PlanError("the work folder could not be removed", file=work.path, hint="remove it, then try again")
        sync_folder(folder)  # the work folder must not come back after a power loss
