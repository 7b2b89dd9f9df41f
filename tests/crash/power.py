"""A model of file systems after a power loss.

POSIX guarantees little: the bytes of a file survive after fsync of the file, a directory entry after fsync of the
directory. Until then every write, truncation, new entry, rename and removal may or may not have reached the disk, in
any combination. The model follows that, except that

    a rename, an exchange and an edit within one page are atomic, as on every journaling file system and disk;
    a change of an entry never survives without earlier changes of that entry, nor the removal of a folder without the
    removal of its content.

`Recording` collects the operations of a process, `Disk` replays them, `Disk.states` yields the possible states after a
reboot.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from crash.changes import Changes

__all__ = ["Disk", "Operation", "Recording", "State"]


@dataclass(frozen=True, slots=True)
class Operation:
    """One change. Paths are relative to the folder observed, "" for itself.

    kind: create, mkdir, write, truncate, sync, rename, exchange, link, remove. other: the second path. at: the offset
    of a write, a new size, or the inode of a new file or folder.
    """

    kind: str
    path: str
    other: str = ""
    at: int = 0
    data: bytes = b""


class Recording(Changes):
    """Changes that record every operation below `top` and are never disturbed."""

    def __init__(self, top: Path) -> None:
        super().__init__()
        self.top = os.path.realpath(top)
        self.operations: list[Operation] = []

    def perform(self, name: str, call: Callable, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Make the call and record it."""
        record = getattr(self, f"on_{name}", None)
        if record is None:
            assert name in ("chmod", "fchmod", "utime"), f"{name} is not modelled"
            return super().perform(name, call, args, kwargs)
        made = record(*args, **kwargs)  # reads the state before the call
        result = super().perform(name, call, args, kwargs)
        self.operations += made(result)
        return result

    def _relative(self, path: Any, dir_fd: int | None = None) -> str | None:
        """The path relative to `top`; None if it is elsewhere. path: a name or a descriptor."""
        if isinstance(path, int):
            full = _opened(path)
        else:
            full = str(Path(_opened(dir_fd) if dir_fd is not None else "/", os.fsdecode(path)))
        if full != self.top and not full.startswith(f"{self.top}/"):
            return None
        return full[len(self.top) + 1 :]

    def _made(self, kind: str, path: Any, other: Any = "", at: int = 0, data: bytes = b"") -> list[Operation]:
        place = self._relative(path)
        if place is None:
            return []
        second = self._relative(other) if other != "" else ""
        assert second is not None, other
        return [Operation(kind, place, second, at, data)]

    def on_open(self, path, flags, mode=0o777, *, dir_fd=None):  # type: ignore[no-untyped-def]
        exists = os.path.lexists(path) if dir_fd is None else os.path.lexists(f"/proc/self/fd/{dir_fd}/{path}")

        def made(fd: int) -> list[Operation]:
            if not exists:
                return self._made("create", fd, at=os.fstat(fd).st_ino)
            return self._made("truncate", fd) if flags & os.O_TRUNC else []

        return made

    def on_mkdir(self, path, mode=0o777, *, dir_fd=None):  # type: ignore[no-untyped-def]
        place = self._relative(path, dir_fd)

        def made(_: None) -> list[Operation]:
            return [] if place is None else [Operation("mkdir", place, at=Path(self.top, place).stat().st_ino)]

        return made

    def on_write(self, fd, data):  # type: ignore[no-untyped-def]
        appends = os.O_APPEND & int(_info(fd, "flags"), 8)
        at = os.fstat(fd).st_size if appends else int(_info(fd, "pos"))
        raw = bytes(data)
        return lambda n: self._made("write", fd, at=at, data=raw[:n])

    def on_pwrite(self, fd, data, offset):  # type: ignore[no-untyped-def]
        raw = bytes(data)
        return lambda n: self._made("write", fd, at=offset, data=raw[:n])

    def on_copy_file_range(self, source, fd, count, offset):  # type: ignore[no-untyped-def]
        at = int(_info(fd, "pos"))
        return lambda n: self._made("write", fd, at=at, data=os.pread(source, n, offset))

    def on_ftruncate(self, fd, size):  # type: ignore[no-untyped-def]
        return lambda _: self._made("truncate", fd, at=size)

    def on_fsync(self, fd):  # type: ignore[no-untyped-def]
        return lambda _: self._made("sync", fd)

    def on_rename(self, old, new):  # type: ignore[no-untyped-def]
        return lambda _: self._made("rename", old, new)

    on_replace = on_rename

    def on_renameat2(self, old, new, how):  # type: ignore[no-untyped-def]
        return lambda moved: self._made("exchange" if how == "exchange" else "rename", old, new) if moved else []

    def on_link(self, old, new, *, follow_symlinks=True):  # type: ignore[no-untyped-def]
        return lambda _: self._made("link", old, new)

    def on_unlink(self, path, *, dir_fd=None):  # type: ignore[no-untyped-def]
        return lambda _: self._made("remove", path)

    on_remove = on_rmdir = on_unlink


def _opened(fd: int) -> str:
    """The path of an open file; of a removed one, with a note that matches no other path."""
    return str(Path(f"/proc/self/fd/{fd}").readlink())


def _info(fd: int, name: str) -> str:
    lines = Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines()
    return next(line.split()[1] for line in lines if line.startswith(f"{name}:"))


@dataclass(eq=False)
class File:
    """The bytes known to be on the disk, and later changes: ("write" or "truncate", offset or size, bytes)."""

    inode: int
    data: bytes = b""
    pending: list[tuple[str, int, bytes]] = field(default_factory=list)


@dataclass(eq=False)
class Folder:
    """now: the entries as a process sees them; stored: those known to be on the disk."""

    inode: int
    now: dict[str, Node] = field(default_factory=dict)
    stored: dict[str, Node] = field(default_factory=dict)


Node = File | Folder


@dataclass(frozen=True, slots=True)
class Edit:
    """One entry before and after."""

    folder: Folder
    name: str
    before: Node | None
    after: Node | None


Change = tuple[Edit, ...]
"""Edits that survive together or not at all."""


@dataclass(frozen=True, slots=True)
class State:
    """The content after a reboot. inodes: path -> the inode it had before; files with the same one are hard links."""

    files: dict[str, bytes]
    folders: tuple[str, ...]
    inodes: dict[str, int]

    def key(self) -> tuple[Any, ...]:
        """Equal for equal content. Inodes identify moved files."""
        return tuple(sorted(self.files.items())), self.folders, tuple(sorted(self.inodes.items()))

    def build(self, top: Path) -> dict[int, int]:
        """Write the content to an empty folder. Returns its inodes -> those before."""
        first: dict[int, Path] = {}
        for name in self.folders:
            (top / name).mkdir(parents=True)
        for name, data in self.files.items():
            if (inode := self.inodes[name]) in first:
                (top / name).hardlink_to(first[inode])
            else:
                (top / name).write_bytes(data)
                first[inode] = top / name
        return {(top / name).stat().st_ino: inode for name, inode in self.inodes.items()}


class Disk:
    """A folder. files: its content at first, all of it on the disk. atomic: writes survive whole or not at all."""

    def __init__(self, files: dict[str, bytes], *, atomic: bool = False) -> None:
        self.root, self.atomic = Folder(0), atomic
        self._waiting: list[Change] = []
        number = 0
        for name, data in sorted(files.items()):
            folder = self.root
            *parents, last = name.split("/")
            for part in parents:
                number -= 1
                node = folder.now.setdefault(part, Folder(number))
                folder.stored[part] = node
                assert isinstance(node, Folder)
                folder = node
            number -= 1
            folder.now[last] = folder.stored[last] = File(number, data)

    def _find(self, path: str) -> Node | None:
        node: Node | None = self.root
        for part in path.split("/") if path else ():
            node = node.now.get(part) if isinstance(node, Folder) else None
        return node

    def _edit(self, *edits: tuple[str, Node | None]) -> None:
        change = []
        for path, after in edits:
            parent, _, name = path.rpartition("/")
            folder = self._find(parent)
            assert isinstance(folder, Folder), path
            change.append(Edit(folder, name, folder.now.get(name), after))
        for edit in change:
            _put(edit.folder.now, edit.name, edit.after)
        self._waiting.append(tuple(change))

    def apply(self, operation: Operation) -> None:
        """Replay one operation."""
        kind, path, other, at = operation.kind, operation.path, operation.other, operation.at
        node = self._find(path)
        if kind in ("create", "mkdir"):
            self._edit((path, File(at) if kind == "create" else Folder(at)))
        elif kind in ("write", "truncate"):
            if isinstance(node, File):  # else removed meanwhile
                node.pending.append((kind, at, operation.data))
        elif kind == "rename":
            self._edit((path, None), (other, node))
        elif kind == "exchange":
            self._edit((path, self._find(other)), (other, node))
        elif kind == "link":
            self._edit((other, node))
        elif kind == "remove":
            self._edit((path, None))
        elif isinstance(node, File):
            node.data, node.pending = _written(node.data, node.pending), []
        elif node is not None:
            self._sync(node)

    def _sync(self, folder: Folder) -> None:
        """Put the waiting changes of a folder on the disk, and those that they depend on."""
        chosen: set[int] = set()
        for i in reversed(range(len(self._waiting))):
            later = [self._waiting[j] for j in chosen]
            if any(e.folder is folder for e in self._waiting[i]) or any(_needs(c, self._waiting[i]) for c in later):
                chosen.add(i)
        for i in sorted(chosen):
            for edit in self._waiting[i]:
                _put(edit.folder.stored, edit.name, edit.after)
        self._waiting = [c for i, c in enumerate(self._waiting) if i not in chosen]

    def now(self) -> State:
        """The content as a process sees it."""
        return self._state(lambda _: True, lambda file: file.pending)

    def states(self, rng: Random, count: int) -> Iterator[State]:
        """Yield states after a power loss now: nothing, all entries without data, and `count` random ones."""
        yield self._state(lambda _: False, lambda _: [])
        yield self._state(lambda _: True, lambda _: [])
        for _ in range(count):
            share = rng.choice((0.2, 0.5, 0.8, 1.0))
            yield self._state(lambda _, p=share: rng.random() < p, lambda file: self._partly(file, rng))

    def _partly(self, file: File, rng: Random) -> list[tuple[str, int, bytes]]:
        """Some of the pending writes of a file: kept, lost, cut in half, or zeros."""
        out = []
        for kind, at, data in file.pending:
            fate = rng.choice(("kept", "kept", "lost") if self.atomic else ("kept", "kept", "lost", "half", "zeros"))
            if fate == "zeros":
                out.append((kind, at, bytes(len(data))))
            elif fate != "lost":
                out.append((kind, at, data[: len(data) // 2] if fate == "half" else data))
        return out

    def _state(self, survives: Callable[[Change], bool], data: Callable[[File], list[tuple[str, int, bytes]]]) -> State:
        stored = {id(f): dict(f.stored) for f in self._folders()}
        for change in self._waiting:
            if survives(change) and _possible(stored, change):
                for edit in change:
                    _put(stored[id(edit.folder)], edit.name, edit.after)
        files: dict[str, bytes] = {}
        folders: list[str] = []
        inodes: dict[str, int] = {}
        contents: dict[int, bytes] = {}

        def walk(folder: Folder, prefix: str) -> None:
            for name, node in sorted(stored[id(folder)].items()):
                place = f"{prefix}{name}"
                inodes[place] = node.inode
                if isinstance(node, Folder):
                    folders.append(place)
                    walk(node, f"{place}/")
                else:
                    if node.inode not in contents:
                        contents[node.inode] = _written(node.data, data(node))
                    files[place] = contents[node.inode]

        walk(self.root, "")
        return State(files, tuple(folders), inodes)

    def _folders(self) -> list[Folder]:
        """All folders that exist or existed."""
        found = {id(self.root): self.root}
        queue: list[Node | None] = [self.root]
        while queue:
            node = queue.pop()
            if isinstance(node, Folder):
                found[id(node)] = node
                queue += [n for n in (*node.now.values(), *node.stored.values()) if id(n) not in found]
        for change in self._waiting:
            for edit in change:
                for node in (edit.folder, edit.before, edit.after):
                    if isinstance(node, Folder):
                        found[id(node)] = node
        return list(found.values())


def _put(entries: dict[str, Node], name: str, node: Node | None) -> None:
    if node is None:
        entries.pop(name, None)
    else:
        entries[name] = node


def _possible(stored: dict[int, dict[str, Node]], change: Change) -> bool:
    """True if the entries are as before the change, and a folder to remove is empty."""
    removed = _removed(change)
    return all(stored[id(e.folder)].get(e.name) is e.before for e in change) and not (removed and stored[id(removed)])


def _removed(change: Change) -> Folder | None:
    """The folder that the change removes. A rename has two edits."""
    gone = change[0].before if len(change) == 1 and change[0].after is None else None
    return gone if isinstance(gone, Folder) else None


def _needs(later: Change, earlier: Change) -> bool:
    """True if `later` edits an entry that `earlier` edited, or removes a folder whose entries it edited."""
    gone = _removed(later)
    return any(b.folder is gone or (a.folder is b.folder and a.name == b.name) for a in later for b in earlier)


def _written(data: bytes, pending: Sequence[tuple[str, int, bytes]]) -> bytes:
    out = bytearray(data)
    for kind, at, raw in pending:
        if kind == "truncate":
            out[at:] = bytes(max(0, at - len(out)))
        else:
            out.extend(bytes(max(0, at - len(out))))
            out[at : at + len(raw)] = raw
    return bytes(out)
