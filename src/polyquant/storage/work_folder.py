"""The work folder next to the target, recognisable as ours, and the publication of its files.

    .NAME.polyquant-RRRRRRRRCCCCCCCC/   created with mode 0700; R: random, C: a checksum of NAME and R, so that no other
                                        program creates such a name
        journal                         locked while a run uses the folder; lists its content (storage/journal.py)
        files/                          the future output
        replaced/                       the previous content of the target
        calibration/                    what the processes of a job share (calibration/shared.py)

The folder of a job in parts (storage/parts.py) is called .NAME.polyquant-parts-..., and only `merge` publishes it.

Nothing in it is opened through a link, and only names listed in the journal are removed. Files that this program did
not write are kept, and so is the folder then.

A publication by one rename is atomic: a new name (`rename_new`), a file over a file, or two folders exchanged. If the
system cannot exchange folders, and for the files of a split model, the old content moves to `replaced` first. The
journal records this before the first rename, and `settle` finishes or undoes an interrupted publication.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import secrets
import stat
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from polyquant.errors import PlanError, printable
from polyquant.storage import journal as journals
from polyquant.storage.journal import Journal, Move, Publication
from polyquant.storage.renames import exchange, named, rename_new, sync_folder

__all__ = [
    "CALIBRATION",
    "FILES",
    "REPLACED",
    "Resume",
    "WorkFolder",
    "belongs_to",
    "busy",
    "inside_work_folder",
    "part_name",
    "parts_name",
]

Resume = Literal["auto", "required", "never"]

FILES, REPLACED, CALIBRATION = "files", "replaced", "calibration"
_SHARED = re.compile(r"[0-9a-f]{8}-.+\.(json|array|claim|new|probe)")
"""Files of a calibration that several processes share (calibration/shared.py)."""
_MARK = re.compile(rb"\.(.*)\.polyquant-(parts-)?([0-9a-f]{8})([0-9a-f]{8})", re.DOTALL)
_NAME_BYTES = 200
"""Bytes of the target's name used in the folder's name: a file name has at most 255 bytes."""


def _checksum(target: str, token: bytes) -> bytes:
    return hashlib.sha256(b"polyquant work folder\0" + os.fsencode(target) + b"\0" + token).hexdigest()[:8].encode()


def _name(target: str, token: bytes, mark: bytes = b"") -> str:
    shown = os.fsencode(target)[:_NAME_BYTES]
    return os.fsdecode(b".%s.polyquant-%s%s%s" % (shown, mark, token, _checksum(target, token)))


def parts_name(target: str, job: str) -> str:
    """The name of the folder of a job in parts: the same for all parts."""
    return _name(target, job[:8].encode(), b"parts-")


def part_name(part: int, count: int) -> str:
    """The name of the journal of one part of a job."""
    return f"part-{part}-of-{count}"


def belongs_to(name: str, target: str, *, parts: bool) -> bool:
    """True for the name of a work folder of this target; parts: of a job in parts."""
    match = _MARK.fullmatch(os.fsencode(name))
    return (
        match is not None
        and bool(match[2]) == parts
        and match[1] == os.fsencode(target)[:_NAME_BYTES]
        and match[4] == _checksum(target, match[3])
    )


def inside_work_folder(path: Path) -> bool:
    """Return True if a component of the path has the name of a work folder."""
    return any(_MARK.fullmatch(os.fsencode(part)) for part in path.parts)


def _add_leftover_note(error: BaseException, path: Path) -> None:
    """Name a work folder that could not be removed."""
    if os.path.lexists(path):
        error.add_note(f"unfinished output could not be removed: rm -r '{printable(path)}'")


def _inode(path: Path) -> int | None:
    """Return the inode of a path without following links; None if it does not exist."""
    try:
        return path.lstat().st_ino
    except (FileNotFoundError, NotADirectoryError):
        return None


class WorkFolder:
    """One work folder, open and locked. Claimed by storage/claims.py."""

    def __init__(self, path: Path, target: Path, journal: int) -> None:
        self.path, self.target, self.journal = path, target, journal
        self.files = path / FILES

    @classmethod
    def create(cls, target: Path, job: str, files: Sequence[str], **more: Any) -> WorkFolder:
        """Create a new work folder. more: further values of the journal's first line. Raises OSError."""
        path = target.parent / _name(target.name, secrets.token_hex(4).encode())
        path.mkdir(mode=0o700)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_NOFOLLOW
        try:
            folder = cls(path, target, os.open(path / journals.NAME, flags, 0o600))
        except OSError as error:
            with suppress(OSError):
                path.rmdir()
            _add_leftover_note(error, path)
            raise
        try:
            fcntl.flock(folder.journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
            folder.append(job=job, target=target.name, files=list(files), **more)
            folder._sync()  # without it the content cannot be recognised as ours after a power loss
            folder.files.mkdir()
        except BaseException as error:
            folder.abandon(error, resumable=False)
            folder.close()
            raise
        return folder

    @classmethod
    def take(cls, path: Path, target: Path, *, shared: bool = False) -> WorkFolder | None:
        """Take over the folder of an ended run. None if it is not ours. Raises PlanError if a run is using it.

        shared: others may take it so at the same time (parts of a job).
        """
        status = path.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            return None
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
            journal = os.open(path / journals.NAME, flags, 0o600)
        except OSError:  # a link, a folder
            return None
        if not stat.S_ISREG(os.fstat(journal).st_mode):
            os.close(journal)
            return None
        try:
            fcntl.flock(journal, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(journal)
            raise busy(target) from None
        folder = cls(path, target, journal)
        if (earlier := folder.read_journal()) is not None:
            try:
                os.ftruncate(journal, earlier.nbytes)  # a torn last line would hide every line appended to it
            except OSError as problem:
                folder.close()
                problem.filename = str(path / journals.NAME)
                raise
        return folder

    def close(self) -> None:
        """Release the lock."""
        os.close(self.journal)

    def append(self, **values: Any) -> None:
        """Append one line to the journal. Raises OSError."""
        with named(self.path / journals.NAME):
            journals.append(self.journal, **values)

    def _sync(self) -> None:
        """Sync the journal and its name."""
        with named(self.path / journals.NAME):
            os.fsync(self.journal)
        sync_folder(self.path)

    def read_journal(self, *, tensors: bool = False) -> Journal | None:
        """Return the journal of earlier runs, `tensors` with the complete ones; None if nothing in it is valid."""
        return journals.read(self.journal, tensors=tensors)

    def discard(self) -> None:
        """Remove our files, then the folder itself if it is empty."""
        journal = self.read_journal()
        old = dict(journal.publication.old) if journal is not None and journal.publication is not None else {}
        count = (journal.parts or {}).get("count", 0) if journal is not None else 0
        parts = [part_name(part, count) for part in range(1, count + 1)]
        if journal is not None:
            _remove(self.files, journal.files)
        for part in parts:
            _remove(self.path / part, ())
        with suppress(OSError):
            shared = [p.name for p in (self.path / CALIBRATION).iterdir()]
            _remove(self.path / CALIBRATION, [name for name in shared if _SHARED.fullmatch(name)])
        for name, inside in old.items():
            _remove(self.path / REPLACED / name, inside)
        with suppress(OSError):
            (self.path / REPLACED).rmdir()
        if not any(os.path.lexists(self.path / name) for name in (FILES, REPLACED, CALIBRATION, *parts)):
            with suppress(OSError):  # a full disk
                sync_folder(self.path)  # content that comes back after a power loss needs its journal
            with suppress(OSError):
                (self.path / journals.NAME).unlink(missing_ok=True)
                self.path.rmdir()

    def abandon(self, error: BaseException, *, resumable: bool) -> None:
        """After an error: finish or undo the publication; if undone, remove our files unless a run can resume them.

        The error gets a note about a folder that remains.
        """
        shown = f"'{printable(self.path)}'"
        try:
            if not self.settle() and not resumable:
                self.discard()
        except OSError:
            error.add_note(f"the same command restores the target from {shown}, which must not be removed")
        else:
            if resumable and os.path.lexists(self.files):
                error.add_note(f"the same command resumes; to discard the unfinished output: rm -r {shown}")
            else:
                _add_leftover_note(error, self.path)

    # ---------------------------------------------------------------- publication

    def publish(self, moves: Sequence[tuple[str, Path]], old: Mapping[str, Sequence[str]]) -> None:
        """Rename each (file in this folder -> target), remove the replaced targets, then this folder.

        The first move is done last, because readers start from the first file of a split model. old: existing target
        that may be replaced -> files inside it that may be removed. Raises PlanError if another target exists, OSError.
        """
        planned = tuple(Move(file, target.name, _known(self.path / file)) for file, target in moves)
        publication = Publication(planned, {name: tuple(inside) for name, inside in old.items()})
        self._record(publication)
        if len(moves) == 1:
            self._publish_one(self.path / moves[0][0], moves[0][1], replace=moves[0][1].name in old)
        else:
            self._publish_several(moves, old)
        self._finish(publication)

    def _publish_one(self, source: Path, target: Path, *, replace: bool) -> None:
        if not replace:
            _rename_to_free(source, target)
        elif not source.is_dir():
            source.replace(target)
        elif exchange(source, target):
            self._put_aside(source, target.name)
        else:
            self._set_aside(target)
            _rename_to_free(source, target)

    def _publish_several(self, moves: Sequence[tuple[str, Path]], old: Mapping[str, Sequence[str]]) -> None:
        """Rename several files so that the first one never exists without the others, even after a power loss."""
        first, *rest = moves
        for group in ([first], rest):
            replaced = [target for _, target in group if target.name in old]
            for target in replaced:
                self._set_aside(target)
            if replaced:
                sync_folder(self.target.parent)
        for file, target in reversed(rest):
            _rename_to_free(self.path / file, target)
        sync_folder(self.target.parent)
        _rename_to_free(self.path / first[0], first[1])

    def _set_aside(self, target: Path) -> None:
        self._put_aside(target, target.name)

    def _put_aside(self, path: Path, name: str) -> None:
        with suppress(FileExistsError):
            (self.path / REPLACED).mkdir(mode=0o700)
            sync_folder(self.path)
        rename_new(path, self.path / REPLACED / name)

    def settle(self) -> bool:
        """After a kill during a publication: finish it (True) or undo it (False)."""
        journal = self.read_journal()
        publication = journal.publication if journal is not None else None
        if publication is None or not publication.moves:
            return False
        parent = self.target.parent
        published = [m for m in publication.moves if _inode(parent / m.target) == m.inode]
        if len(published) == len(publication.moves):
            self._finish(publication)
            return True
        for move in published:
            rename_new(parent / move.target, self.path / move.file)
        for name in reversed(list(publication.old)):
            aside = self.path / REPLACED / name
            if os.path.lexists(aside):
                sync_folder(parent)
                _rename_to_free(aside, parent / name)
        sync_folder(parent)
        self._record(Publication((), {}))
        return False

    def _finish(self, publication: Publication) -> None:
        """Remove the replaced content and this folder, after all targets are published."""
        sync_folder(self.target.parent)
        first = publication.moves[0]
        if _inode(self.path / first.file) is not None and first.target in publication.old:
            self._put_aside(self.path / first.file, first.target)  # exchanged: the old folder is at our path
        self.discard()

    def _record(self, publication: Publication) -> None:
        moves = [[m.file, m.target, m.inode] for m in publication.moves]
        self.append(moves=moves, old={k: list(v) for k, v in publication.old.items()})
        self._sync()
        sync_folder(self.target.parent)  # the name of this folder


def _known(path: Path) -> int:
    inode = _inode(path)
    assert inode is not None, f"{path} does not exist"
    return inode


def _rename_to_free(source: Path, target: Path) -> None:
    """Rename to a name that must not exist. Raises PlanError if it does."""
    try:
        rename_new(source, target)
    except FileExistsError:
        raise PlanError("target exists", file=target, hint="choose another name, or pass --overwrite") from None


def _remove(path: Path, names: Iterable[str]) -> None:
    """Remove a regular file, or the named files of a folder and then the folder if it is empty. Never follows links."""
    with suppress(OSError):  # files that cannot be removed are kept, and so is the work folder
        mode = path.lstat().st_mode
        if stat.S_ISREG(mode):
            path.unlink()
        elif stat.S_ISDIR(mode):
            names = sorted(names)
            for name in names:
                if "/" not in name:
                    _remove(path / name, ())
            for folder in {name.partition("/")[0] for name in names if "/" in name}:
                _remove(path / folder, [n.partition("/")[2] for n in names if n.startswith(f"{folder}/")])
            path.rmdir()


def busy(target: Path) -> PlanError:
    """The error for a target that another run is writing."""
    return PlanError("another run is writing this target", file=target, hint="wait for it, or stop it")
