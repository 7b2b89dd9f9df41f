"""Every job that writes survives a kill, a full disk and errors at any of its changes of the file system.

The old or the new content is at its name after each, the next run gives the same bytes, and no work folder remains.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from crash.changes import DISTURBANCES, KILLS, SYNCS
from crash.verbs import QUICK, VERBS

PROGRAM = Path(__file__).with_name("every_point.py")


class Server:
    """Asks one process about many jobs."""

    def __init__(self, *before: str) -> None:
        self._child = subprocess.Popen(
            [*before, sys.executable, PROGRAM, "--serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __call__(self, verb: str, how: tuple[str, ...], every: int) -> dict:
        assert self._child.stdin is not None and self._child.stdout is not None
        self._child.stdin.write(json.dumps({"verb": verb, "how": how, "every": every}) + "\n")
        self._child.stdin.flush()
        return json.loads(self._child.stdout.readline())

    def close(self) -> None:
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.wait()


@contextmanager
def serving() -> Iterator[Server]:
    server = Server()
    try:
        yield server
    finally:
        server.close()


@pytest.fixture(scope="module")
def ask():
    with serving() as server:
        yield server


def different(calls: list[str]) -> int:
    """The number of moments to kill at that leave different files."""
    return sum(before not in SYNCS for before in ("", *calls[:-1]))


def check(found: dict, at_least: int) -> None:
    assert not found["wrong"], "\n".join(found["wrong"][:5])
    assert found["tried"] >= at_least


@pytest.mark.parametrize("verb", QUICK)
def test_killed_before_and_in_each_change(ask, verb):
    found = ask(verb, KILLS[:2], 1)
    check(found, different(found["calls"]))


@pytest.mark.parametrize(("verb", "how"), [(v, DISTURBANCES[n % 2 :: 2]) for n, v in enumerate(VERBS)])
def test_kills_and_errors_at_one_point_each(ask, verb, how):
    """Each kind disturbs half of the jobs; below, all of them."""
    check(ask(verb, how, 200), len(how) - 1)


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS)
def test_every_job_killed_before_and_in_each_change(ask, verb, record_property):
    found = ask(verb, KILLS, 1)
    record_property("calls", len(found["calls"]))
    check(found, different(found["calls"]))


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS)
def test_every_job_with_errors_at_each_change(ask, verb, record_property):
    found = ask(verb, DISTURBANCES[len(KILLS) :], 1)
    record_property("runs", found["tried"])
    check(found, 5 * len(found["calls"]))


@pytest.mark.parametrize("verb", ["gguf-overwrite", "trellis"])
def test_killed_at_random_moments(ask, verb):
    check(ask(verb, ("random",), 6), 6)


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["quantize", "split-overwrite", "folder-overwrite", "trellis", "msmodelslim"])
def test_killed_often_at_random_moments(ask, verb):
    check(ask(verb, ("random",), 40), 40)


SYSTEM_CALLS = {
    "openat": "open", "open": "open", "creat": "open", "write": "write", "pwrite64": "pwrite", "writev": "writev",
    "pwritev": "pwritev", "pwritev2": "pwritev", "copy_file_range": "copy_file_range", "sendfile": "sendfile",
    "splice": "splice", "ftruncate": "ftruncate", "truncate": "truncate", "fallocate": "fallocate",
    "mkdir": "mkdir", "mkdirat": "mkdir", "rmdir": "rmdir", "unlink": "unlink", "unlinkat": "unlink",
    "rename": "rename", "renameat": "rename", "renameat2": "rename", "link": "link", "linkat": "link",
    "symlink": "symlink", "symlinkat": "symlink", "fsync": "fsync", "fdatasync": "fdatasync", "fchmod": "fchmod",
    "chmod": "chmod", "fchmodat": "chmod", "utimensat": "utime", "mknod": "mknod", "mknodat": "mknod",
}  # fmt: skip
"""System call -> the function of `os` that makes it."""
SAME = {"replace": "rename", "renameat2": "rename", "remove": "unlink"}


def traced(log: str, pid: int, top: str) -> list[str]:
    """The calls of one process and its threads that change something below `top`."""
    tasks, out = {str(pid)}, []
    for line in log.splitlines():
        task, _, call = line.partition(" ")
        call = call.strip()
        if task not in tasks:
            continue
        if started := re.fullmatch(r"(?:clone3?|v?fork)\(.*= (\d+)", call):
            tasks.add(started[1])
        name = call.partition("(")[0]
        if name in SYSTEM_CALLS and top in call:
            reads = name in ("open", "openat") and not re.search("O_WRONLY|O_RDWR|O_CREAT|O_TRUNC", call)
            out += [] if reads else ["rmdir" if "AT_REMOVEDIR" in call else SYSTEM_CALLS[name]]
    return out


def can_trace() -> bool:
    strace = shutil.which("strace")
    return strace is not None and subprocess.run([strace, "true"], capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not can_trace(), reason="strace is not installed, or may not trace")
def test_no_change_escapes(tmp_path):
    """The replaced functions see exactly the system calls that the kernel sees, also those of native code."""
    calls = ",".join([*SYSTEM_CALLS, "clone", "clone3", "fork", "vfork"])
    server = Server("strace", "-f", "-qq", "-y", "-s", "1", "-o", str(tmp_path / "log"), "-e", f"trace={calls}")
    verbs = ["save-split-overwrite", "save-folder-overwrite", "edit", "embed-overwrite", "msmodelslim", "repair"]
    try:
        found = {verb: server(verb, (), 1) for verb in verbs}
    finally:
        server.close()
    log = (tmp_path / "log").read_text()
    for verb, answer in found.items():
        seen = traced(log, answer["pid"], answer["top"])
        assert sorted(seen) == sorted(SAME.get(c, c) for c in answer["calls"]), verb  # two threads write
