"""Kills a job before each of its calls that change the file system, then looks at what is left and runs the job again.

Run as a program: crash_points.py SCENARIO FOLDER. Exits with 0 and prints the number of crash points, or fails with the
first that is wrong. Each try happens in a forked child, so it is a program of its own rather than a test that forks the
test runner.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from polyquant.formats.gguf.edit import edit
from polyquant.storage import renames, work_folder
from polyquant.storage.staging import staged
from polyquant.types import ArraySpec, FilePlan, Kind, Layout, Meta, Slot

CHANGING = ("mkdir", "pwrite", "write", "ftruncate", "rename", "replace", "unlink", "rmdir", "link", "fsync", "fchmod")
SPEC = ArraySpec((4,), np.dtype(np.uint8))
JOB = "job"
LONGER = {"general.name": Meta(Kind.STRING, "x" * 5000)}


class Bomb:
    """Counts calls that change files and kills the process before the n-th."""

    def __init__(self, n: int) -> None:
        self.left = n

    def tick(self) -> None:
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1

    def arm(self) -> None:
        for name in CHANGING:
            setattr(os, name, self._wrapped(getattr(os, name)))
        opened = os.open

        def open_(path, flags, *args, **kwargs):
            if flags & os.O_CREAT:
                self.tick()
            return opened(path, flags, *args, **kwargs)

        os.open = open_
        renames._rename = self._wrapped(renames._rename)

    def _wrapped(self, call: Callable) -> Callable:
        def ticking(*args, **kwargs):
            self.tick()
            return call(*args, **kwargs)

        return ticking


def in_child(job: Callable[[], None], kill_before: int | None) -> int:
    """0 if the job ended, -9 if it was killed."""
    pid = os.fork()
    if pid == 0:
        try:
            if kill_before is not None:
                Bomb(kill_before).arm()
            job()
            os._exit(0)
        finally:  # an error
            sys.excepthook(*sys.exc_info())
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def write(dst: Path, files: list[str], *, folder: bool, fill: int) -> None:
    """A job of two tensors a file."""
    slots = {(f"{f}{i}", "blocks"): Slot(f, 8 + 8 * i, SPEC) for f in files for i in range(2)}
    layout = Layout(tuple(FilePlan(f, 24, ((0, b"HEAD"),)) for f in files), slots, folder)
    with staged(
        dst,
        layout,
        f"{JOB}{fill}",
        replaceable=lambda target: tuple(p.name for p in target.iterdir()) if target.is_dir() else (),
    ) as s:
        for tensor, part in slots:
            if tensor not in s.done:
                s.write(tensor, part, 0, np.full(4, fill, np.uint8))
                s.finish(tensor, {})


def whole(fill: int) -> bytes:
    return b"HEAD\0\0\0\0" + bytes([fill] * 4) + bytes(4) + bytes([fill] * 4) + bytes(4)


def contents(folder: Path, *, hidden: bool) -> dict[str, bytes]:
    found = (p for p in sorted(folder.rglob("*")) if p.is_file() and (hidden or ".polyquant-" not in str(p)))
    return {str(p.relative_to(folder)): p.read_bytes() for p in found}


def shown(files: dict[str, bytes]) -> dict[str, bytes]:
    return {name: data[:24] for name, data in files.items()}


def every_point(
    top: Path, job: Callable[[], None], before: Callable[[], None], old: dict[str, bytes], new: dict[str, bytes],
    partly: Callable[[dict[str, bytes]], bool] = lambda seen: False,
) -> int:  # fmt: skip
    """Old or new is at the target after every kill, and the next run replaces it without leftovers."""
    for n in itertools.count():
        shutil.rmtree(top)
        top.mkdir()
        before()
        code = in_child(job, n)
        assert code in (0, -signal.SIGKILL), (n, code)
        seen = contents(top, hidden=False)
        assert seen in (old, new) or partly(seen), (n, shown(seen))
        if code == 0:
            return n
        assert in_child(job, None) == 0, n
        assert contents(top, hidden=True) == new, (n, shown(contents(top, hidden=True)))
        assert not [p for p in top.iterdir() if ".polyquant-" in p.name], n


def named(prefix: str, files: list[str], fill: int) -> dict[str, bytes]:
    return {prefix + f: whole(fill) for f in files}


def folder_scenario(top: Path) -> int:
    files = ["a", "b"]

    def job() -> None:
        write(top / "model", files, folder=True, fill=2)

    def before() -> None:
        write(top / "model", [*files, "c"], folder=True, fill=1)

    return every_point(top, job, before, named("model/", [*files, "c"], 1), named("model/", files, 2))


def folder_two_step_scenario(top: Path) -> int:
    """Without an exchange the target is missing for a moment; the next run restores the old model before it starts."""
    work_folder.exchange = lambda a, b: False

    def job() -> None:
        write(top / "model", ["a"], folder=True, fill=2)

    def before() -> None:
        write(top / "model", ["a", "c"], folder=True, fill=1)

    old, new = named("model/", ["a", "c"], 1), named("model/", ["a"], 2)
    return every_point(top, job, before, old, new, partly=lambda seen: not seen)


def new_folder_scenario(top: Path) -> int:
    def job() -> None:
        if not (top / "model").exists():
            write(top / "model", ["a", "b"], folder=True, fill=2)
        else:  # published, and killed before it was tidy
            work_folder.settle_all(top / "model")

    return every_point(top, job, lambda: None, {}, named("model/", ["a", "b"], 2))


def file_scenario(top: Path) -> int:
    def job() -> None:
        write(top / "m.gguf", ["m.gguf"], folder=False, fill=2)

    def before() -> None:
        write(top / "m.gguf", ["m.gguf"], folder=False, fill=1)

    return every_point(top, job, before, {"m.gguf": whole(1)}, {"m.gguf": whole(2)})


def split_scenario(top: Path) -> int:
    """A split model never looks whole unless it is: its first file goes first and comes last."""
    files = [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]

    def job() -> None:
        write(top / "m.gguf", files, folder=False, fill=2)

    def before() -> None:
        write(top / "m.gguf", files, folder=False, fill=1)

    return every_point(
        top, job, before, named("", files, 1), named("", files, 2), partly=lambda seen: files[0] not in seen
    )


def new_split_scenario(top: Path) -> int:
    files = [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]

    def job() -> None:
        work_folder.settle_all(top / "m.gguf")
        if not (top / files[0]).exists():
            write(top / "m.gguf", files, folder=False, fill=2)

    return every_point(top, job, lambda: None, {}, named("", files, 2), partly=lambda seen: files[0] not in seen)


def edit_scenario(top: Path) -> int:
    original = (top / "model.gguf").read_bytes()
    edit(top / "model.gguf", set=LONGER)
    edited = (top / "model.gguf").read_bytes()
    assert edited != original

    def before() -> None:
        (top / "model.gguf").write_bytes(original)

    def job() -> None:
        if (top / "model.gguf").read_bytes() == original:
            edit(top / "model.gguf", set=LONGER)
        else:
            work_folder.settle_all(top / "model.gguf")

    return every_point(top, job, before, {"model.gguf": original}, {"model.gguf": edited})


if __name__ == "__main__":
    print(globals()[f"{sys.argv[1]}_scenario"](Path(sys.argv[2])))
