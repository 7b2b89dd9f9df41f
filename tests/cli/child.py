"""Run the `polyquant` command in separate processes that start fast: a server imports it once and forks per call.

Each call reports its exit code, output, CPU time and peak memory.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

LEFT_OUT = (
    "polyquant.integrations",
    "polyquant.msmodelslim",
    "polyquant.hf",
    "polyquant.calibration.hessians_torch",
    "polyquant.conversion.engines",
    "polyquant.__main__",
)
"""Modules that the command does not import by itself, or that need torch, Ray or Dask."""
_SANITIZED = "POLYQUANT_SANITIZED" in os.environ
"""Sanitizers take several times the time and memory, so no limit is checked."""


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str
    cpu: float
    """Seconds of processor time."""
    rss: int
    """Peak memory in bytes, without the interpreter and all imports."""

    @property
    def line(self) -> str:
        """The one line on stderr; fails where there are more, or a traceback."""
        assert self.err.count("\n") == 1 and "Traceback" not in self.err, self.err
        return self.err.strip()


class Server:
    """`run` is one call of the command; close() ends the server."""

    def __init__(self, cwd: Path | None = None, **environment: str) -> None:
        env = {**os.environ, "COLUMNS": "80", "NO_COLOR": "1", **environment}
        self._child = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, cwd=cwd
        )

    def run(self, *args: object, file_limit: int | None = None, columns: int = 80) -> Outcome:
        """file_limit: maximum file size in bytes, to simulate a full disk."""
        asked = {"args": [os.fspath(a) if isinstance(a, Path) else str(a) for a in args]}
        assert self._child.stdin is not None and self._child.stdout is not None
        self._child.stdin.write(json.dumps({**asked, "file_limit": file_limit, "columns": columns}) + "\n")
        self._child.stdin.flush()
        return Outcome(**json.loads(self._child.stdout.readline()))

    def listen(self, path: Path) -> None:
        """Let a fork answer the clients of a socket, for tests whose commands run in a shell (docs/console.py)."""
        assert self._child.stdin is not None and self._child.stdout is not None
        self._child.stdin.write(json.dumps({"listen": str(path)}) + "\n")
        self._child.stdin.flush()
        assert self._child.stdout.readline() == "listening\n"

    def close(self) -> None:
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.wait()


def call(args: list[str], ended: Callable[[int], None] = os._exit) -> NoReturn:
    """Run the command in a forked child, and end the child; ended: called with the exit code before that."""
    from polyquant.cli import main

    code = 70
    try:
        main(args)
        code = 0
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else 0 if e.code is None else 1
    except BaseException:  # noqa: BLE001 - the test sees it: code 70 and the traceback
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        ended(code)
        os._exit(code)


def _call(args: list[str], file_limit: int | None, columns: int, out: int, err: int) -> NoReturn:
    """In the forked child."""
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.environ["COLUMNS"] = str(columns)
    if file_limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))
    call(args)


def warm() -> None:
    """Import everything that a command may need, so that a forked child starts at once."""
    import polyquant.cli
    from polyquant import registry
    from polyquant.conversion import speed

    speed._SECONDS = 0.001  # of each measurement of a plan; tests of its estimates run elsewhere
    for name in registry.CODECS:
        registry.codec(name)
    registry.architectures()
    for command in polyquant.cli.COMMANDS:
        polyquant.cli.cli.get_command(None, command)  # type: ignore[arg-type]
    root = Path(polyquant.__path__[0])
    for path in sorted(root.rglob("*.py")):
        module = ".".join(("polyquant", *path.relative_to(root).with_suffix("").parts)).removesuffix(".__init__")
        if not module.startswith(LEFT_OUT):
            importlib.import_module(module)
    for module in ("console", "progress", "spinner", "table", "text"):
        importlib.import_module(f"rich.{module}")
    gc.collect()
    gc.freeze()  # collections in a fork do not touch, and so copy, the objects of all modules


def _serve() -> None:
    warm()
    if (pid := os.fork()) == 0:
        os._exit(0)
    base = os.wait4(pid, 0)[2].ru_maxrss
    listeners = []
    for line in sys.stdin:
        asked = json.loads(line)
        if "listen" in asked:
            listeners.append(_listen(asked["listen"]))
            print("listening", flush=True)
            continue
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            pid = os.fork()
            if pid == 0:
                _call(asked["args"], asked["file_limit"], asked["columns"], out.fileno(), err.fileno())
            _, status, used = os.wait4(pid, 0)
            texts = []
            for f in (out, err):
                f.seek(0)
                texts.append(f.read().decode())
        answer = {
            "code": os.waitstatus_to_exitcode(status),
            "out": texts[0],
            "err": texts[1],
            "cpu": 0.0 if _SANITIZED else used.ru_utime + used.ru_stime,
            "rss": 0 if _SANITIZED else (used.ru_maxrss - base) * 1024,
        }
        print(json.dumps(answer), flush=True)
    for pid in listeners:
        os.kill(pid, signal.SIGKILL)


def _listen(path: str) -> int:
    """Fork a process that answers clients; its id."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from docs.console import answer

    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    if (pid := os.fork()) == 0:
        answer(listener)
    listener.close()
    return pid


if __name__ == "__main__":
    _serve()
