"""The state of an unfinished upload on this machine: one folder per target, so that the same command resumes.

    $XDG_STATE_HOME/polyquant/uploads/HASH/    by default ~/.local/state; mode 0700; HASH: of the target's URL
        journal                                locked while a run uses the folder; lines as in storage/journal.py
        known-N                                small files of a publication that has begun
        (a temporary file without a name)      parts in progress that do not fit into memory

    {"upload": JOB, "target": URL, "token": TOKEN, "files": [[URL, BYTES, PART_BYTES], ...]}
    {"others": [[URL, UPLOAD_ID], ...]}
    {"begun": [FILE, UPLOAD_ID]}
    {"part": [FILE, NUMBER, ETAG]}
    {"tensor": NAME, "report": ..., "small": [[FILE, OFFSET, HEX], ...]}
    {"publish": [[FILE, ...], ...], "first": [FILE, ...], "replace": BOOL}

FILE is an index. others: unfinished uploads that existed before ours, so that those whose ids were lost with an answer
can be recognised. small: the bytes of small slots, which may be in a part that waits for many tensors. publish: groups
of files in the order of the publication; first: files of which an old version is removed before it. There are no
credentials in it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polyquant.storage import journal as journals
from polyquant.storage.locations import RemotePath
from polyquant.storage.renames import sync_folder
from polyquant.storage.work_folder import busy

__all__ = ["Recorded", "UploadState", "publishing", "state_folder"]


@dataclass(slots=True)
class Recorded:
    """The content of a journal. uploads: file -> id; parts: file -> number -> ETag; tensors: name -> its line."""

    job: str = ""
    token: str = ""
    files: Sequence[Sequence[Any]] = ()
    others: set[tuple[str, str]] | None = None
    uploads: dict[int, str] = field(default_factory=dict)
    parts: dict[int, dict[int, str]] = field(default_factory=dict)
    tensors: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    publish: Sequence[Sequence[int]] | None = None
    first: Sequence[int] = ()
    replace: bool = False


def state_folder(target: RemotePath) -> Path:
    """The folder for uploads to this target."""
    home = Path(os.environ.get("XDG_STATE_HOME", ""))
    base = home if home.is_absolute() else Path.home() / ".local" / "state"
    return base / "polyquant" / "uploads" / hashlib.sha256(str(target).encode()).hexdigest()[:32]


def publishing(target: RemotePath) -> bool:
    """Return True if a run was killed while it published to this target; the next run finishes that."""
    try:
        fd = os.open(state_folder(target) / journals.NAME, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        return _read(fd)[0].publish is not None
    finally:
        os.close(fd)


class UploadState:
    """The folder of one target, open and locked."""

    def __init__(self, target: RemotePath) -> None:
        """Open or create it. Raises PlanError if another run is using it, OSError."""
        self.target, self.folder, self._lock = target, state_folder(target), threading.Lock()
        self._journal = self._locked()
        self.known, valid = _read(self._journal)
        os.ftruncate(self._journal, valid)  # a torn last line would hide every line appended to it

    def _locked(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        while True:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                fd = os.open(self.folder / journals.NAME, flags, 0o600)
            except FileNotFoundError:  # removed by a run that has just ended
                continue
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(fd), (self.folder / journals.NAME).lstat()):
                    return fd
            except BlockingIOError:
                os.close(fd)
                raise busy(self.target) from None
            except FileNotFoundError:
                pass
            os.close(fd)

    def begin(self, job: str, files: Sequence[Sequence[Any]]) -> None:
        """Start a new journal."""
        os.ftruncate(self._journal, 0)
        token, self.known = secrets.token_hex(8), Recorded()
        self.append(upload=job, target=str(self.target), token=token, files=files)
        self.sync()

    def append(self, **values: Any) -> None:
        """Append one line, and apply it to `known`. Thread-safe. Raises OSError."""
        with self._lock:
            journals.append(self._journal, **values)
            _take(self.known, values)

    def sync(self) -> None:
        """Sync the journal and its name."""
        os.fsync(self._journal)
        sync_folder(self.folder)

    def keep(self, index: int, data: bytes) -> None:
        """Keep a small file for the publication."""
        with (self.folder / f"known-{index}").open("wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())

    def kept(self, index: int) -> bytes:
        """Return a small file of the publication."""
        return (self.folder / f"known-{index}").read_bytes()

    def discard(self) -> None:
        """Remove our files, and the folder."""
        with suppress(OSError):
            for path in self.folder.glob("known-*"):
                path.unlink()
            (self.folder / journals.NAME).unlink()
            self.folder.rmdir()

    def close(self) -> None:
        """Release the lock."""
        os.close(self._journal)


def _read(journal: int) -> tuple[Recorded, int]:
    """The entries of a journal, and the length of its valid lines."""
    out, good = Recorded(), 0
    for line in journals.lines(journal):
        entry = journals.parsed(line)
        if entry is None or (not good and "upload" not in entry):
            break
        good += len(line)
        _take(out, entry)
    return out, good


def _take(out: Recorded, entry: Mapping[str, Any]) -> None:
    """Apply one entry."""
    if "upload" in entry:
        out.job, out.token, out.files = entry["upload"], entry["token"], entry["files"]
    elif "others" in entry:
        out.others = {(url, upload) for url, upload in entry["others"]}
    elif "begun" in entry:
        index, upload = entry["begun"]
        out.uploads[index] = upload
        out.parts.pop(index, None)
    elif "part" in entry:
        index, number, etag = entry["part"]
        out.parts.setdefault(index, {})[number] = etag
    elif "tensor" in entry:
        out.tensors[entry["tensor"]] = entry
    elif "publish" in entry:
        out.publish, out.first, out.replace = entry["publish"], entry["first"], entry["replace"]
