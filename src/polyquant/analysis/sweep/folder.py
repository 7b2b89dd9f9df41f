"""The work folder of a sweep: its journal, the candidates in it, and their removal.

    journal          one line per finished step (storage/journal.py): identity, source, conversions, measurements
    reference/       logits of the source
    NAME, NAME.gguf  candidates

Only files whose state is the one recorded in the journal are removed: a file that was changed or replaced is kept.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from polyquant.analysis.sweep.scores import Stored
from polyquant.analysis.sweep.trials import Measurement
from polyquant.conversion.report import StepReport
from polyquant.errors import PlanError, printable
from polyquant.storage import journal as journals
from polyquant.storage.renames import named, sync_folder

__all__ = ["WorkPlace", "begun", "file_states"]

_JOURNAL, _REFERENCE = "journal", "reference"
_VERSION = 1
_WHAT = {
    "source": "the source", "text": "the text", "version": "the version of polyquant", "tokens": "--tokens",
    "context": "--context", "threads": "--threads", "speed": "the length of the speed test",
}  # fmt: skip


class WorkPlace:
    """An open, locked work folder. entries: candidate's key -> its latest entries by kind."""

    def __init__(self, path: Path, journal: int) -> None:
        self.path, self._journal = path, journal
        self.reference = path / _REFERENCE
        self.source: dict[str, Any] | None = None
        self.damage: dict[str, Any] = {}
        self.entries: dict[str, dict[str, dict[str, Any]]] = {}
        self.identity: dict[str, str] | None = None
        self._read()

    @classmethod
    def open(cls, path: Path) -> WorkPlace:
        """Open the folder, or make it. Raises PlanError for a folder with other content, or that a sweep is using."""
        if not path.absolute().parent.is_dir():
            raise PlanError("the folder above --work does not exist", file=path, hint=f"mkdir -p {path.parent}")
        with suppress(FileExistsError):
            path.mkdir()
        if not path.is_dir():
            raise PlanError("is not a folder", file=path, hint="choose another --work")
        journal = path / _JOURNAL
        if any(path.iterdir()) and not _is_ours(journal):
            raise PlanError("the folder is not empty and is not of a sweep", file=path, hint="choose another --work")
        fd = os.open(journal, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise PlanError("another sweep is using this folder", file=path, hint="wait for it, or stop it") from None
        try:
            return cls(path, fd)
        except BaseException:
            os.close(fd)
            raise

    def close(self) -> None:
        """Release the folder."""
        os.close(self._journal)

    def _read(self) -> None:
        """Read the journal. Raises PlanError for an entry that a sweep does not write."""
        good = 0
        for line in journals.lines(self._journal):
            try:
                entry = journals.parsed(line)
                if entry is not None:
                    _check(entry)
            except (KeyError, TypeError, ValueError, RecursionError) as problem:
                raise PlanError(
                    "the journal is not that of a sweep", file=self.path / _JOURNAL, found=f"{problem}",
                    hint="choose another --work",
                ) from None  # fmt: skip
            if entry is None:
                break
            good += len(line)
            self._take(entry)
        os.ftruncate(self._journal, good)  # a torn last line would hide every line appended to it

    def _take(self, entry: dict[str, Any]) -> None:
        kind = entry["kind"]
        if kind == "sweep":
            self.identity = entry["identity"]
        elif kind == "source":
            self.source = entry
        elif kind == "damage":
            self.damage[entry["family"]] = entry["measured"]
        else:
            self.entries.setdefault(entry["key"], {})[kind] = entry
            if kind == "started":  # later entries belong to this attempt
                self.entries[entry["key"]] = {kind: entry}

    def record(self, kind: str, **values: Any) -> None:
        """Append an entry and sync it. Raises OSError."""
        entry = {"kind": kind, **values}
        with named(self.path / _JOURNAL):
            journals.append(self._journal, **entry)
            os.fsync(self._journal)
        if kind == "sweep":
            sync_folder(self.path)
        self._take(entry)

    def begin(self, identity: Mapping[str, str]) -> None:
        """Record the identity of a new sweep, or compare it with the recorded one. Raises PlanError if it differs."""
        if self.identity is None:
            self.record("sweep", version=_VERSION, identity=dict(identity))
            return
        changed = [word for key, word in _WHAT.items() if self.identity.get(key) != identity.get(key)]
        if changed:
            raise PlanError(
                f"{' and '.join(changed)} changed since this sweep began", file=self.path,
                hint="choose another --work, or pass --restart to measure everything again",
            )  # fmt: skip

    def restart(self) -> list[str]:
        """Forget all results and remove the candidates. Returns the names of files that are kept."""
        kept = [name for key in list(self.entries) for name in self.remove(key)]
        self._discard_reference()
        os.ftruncate(self._journal, 0)
        self.identity, self.source, self.damage, self.entries = None, None, {}, {}
        return kept

    def used(self) -> int:
        """Bytes of all files in the folder."""
        total = 0
        for root, _, names in os.walk(self.path):
            for name in names:
                with suppress(OSError):
                    total += (Path(root) / name).lstat().st_size
        return total

    def intact(self, key: str) -> Path | None:
        """The path of a converted candidate whose files are unchanged; None for others."""
        entry = self.entries.get(key, {}).get("converted")
        if entry is None:
            return None
        path = self.path / str(entry["path"])
        return path if entry["files"] and file_states(path) == entry["files"] else None

    def remove(self, key: str) -> list[str]:
        """Remove the files of a candidate. Returns those that are kept because they changed or are unknown."""
        entry = self.entries.get(key, {}).get("converted")
        if entry is None:
            return []
        path = self.path / str(entry["path"])
        kept = []
        for name, state in entry["files"].items():
            file = path / name if name else path
            if _state(file) == state:
                file.unlink()
            elif os.path.lexists(file):
                kept.append(printable(file.name))
        if path.is_dir() and not path.is_symlink():
            for folder in sorted((p for p in path.rglob("*") if p.is_dir()), reverse=True):
                with suppress(OSError):
                    folder.rmdir()
            with suppress(OSError):
                path.rmdir()
            if path.is_dir():
                kept += [printable(p.name) for p in path.iterdir() if p.name not in kept]
        return kept

    def _discard_reference(self) -> None:
        """Remove the stored logits."""
        names = [] if self.source is None else [name for name, *_ in self.source["stored"]["files"]]
        for name in names:
            with suppress(OSError):
                (self.reference / name).unlink()
        with suppress(OSError):
            self.reference.rmdir()


def begun(path: Path) -> bool:
    """True for the work folder of a sweep that began before."""
    return _is_ours(path / _JOURNAL)


def _is_ours(journal: Path) -> bool:
    """True for a journal whose first line is that of a sweep, or that is empty because a kill came first."""
    try:
        fd = os.open(journal, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        first = next(journals.lines(fd), b"")
        if not first.endswith(b"\n"):  # torn
            return len(first) == os.fstat(fd).st_size and len(list(journal.parent.iterdir())) == 1
        with suppress(ValueError, RecursionError):
            entry = journals.parsed(first)
            return isinstance(entry, dict) and entry.get("kind") == "sweep"
        return False
    finally:
        os.close(fd)


def _check(entry: dict[str, Any]) -> None:
    """Raise KeyError, TypeError or ValueError for an entry without its values, or with a path outside the folder."""
    kind = entry["kind"]
    texts: dict[str, tuple[str, ...]] = {
        "sweep": (), "source": (), "damage": ("family",), "started": ("key", "name"), "converted": ("key", "path"),
        "measured": ("key",), "failed": ("key", "reason"),
    }  # fmt: skip
    if not all(isinstance(entry[name], str) for name in texts[kind]):
        raise TypeError(f"an entry '{kind}'")
    names: list[str] = []
    if kind == "sweep":
        dict(entry["identity"])
    elif kind == "source":
        Measurement.from_json(entry["measurement"])
        names = [name for name, _, _ in Stored.from_json(entry["stored"]).files]
    elif kind == "damage":
        dict(entry["measured"])
    elif kind == "converted":
        float(entry["seconds"])
        [StepReport.from_json(step) for step in entry["steps"]]
        names = [entry["path"], *(name for name in entry["files"] if name)]
        if "/" in entry["path"]:
            raise ValueError(entry["path"])
    elif kind == "measured":
        Measurement.from_json(entry["measurement"])
    for name in names:
        if Path(name).is_absolute() or ".." in Path(name).parts or not Path(name).parts:
            raise ValueError(f"the path {printable(name)}")


def _state(path: Path) -> list[int] | None:
    """Size and time of a regular file; None for anything else."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return [status.st_size, status.st_mtime_ns] if stat.S_ISREG(status.st_mode) else None


def file_states(path: Path) -> dict[str, list[int]]:
    """Relative name ("" for a single file) -> state of the files of a candidate; {} if one is not a regular file."""
    if not path.is_dir():
        state = _state(path)
        return {} if state is None else {"": state}
    out = {}
    for file in sorted(p for p in path.rglob("*") if not p.is_dir() or p.is_symlink()):
        state = _state(file)
        if state is None:
            return {}
        out[str(file.relative_to(path))] = state
    return out
