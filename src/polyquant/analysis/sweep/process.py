"""Start a child process (child.py), relay its progress, and return its result or the reason why there is none."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from polyquant.errors import printable

__all__ = ["Answer", "run_child"]

_PATIENCE = 20.0
"""Seconds in which an interrupted process has to end."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The result, or an error. final: the same step would fail again; late: the time was up."""

    result: Mapping[str, Any] | None = None
    error: str = ""
    final: bool = False
    late: bool = False


def run_child(
    task: str,
    request: Mapping[str, Any],
    *,
    seconds: float | None = None,
    tell: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> Answer:
    """Run a task. seconds: until it is interrupted; tell: called with (what, done, total)."""
    command = [sys.executable, "-P", "-m", "polyquant.analysis.sweep.child"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    late = threading.Event()
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(  # noqa: S603 - our own program under our own interpreter
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=environment, text=True,
            encoding="utf-8", start_new_session=True,
        )  # fmt: skip
        timer = threading.Timer(seconds, _interrupt, (child, late)) if seconds is not None else None
        if timer is not None:
            timer.daemon = True
            timer.start()
        try:
            answer = _listen(child, {**request, "task": task}, tell)
            code = child.wait()
        except BaseException:
            _stop(child)
            raise
        finally:
            if timer is not None:
                timer.cancel()
            for stream in (child.stdin, child.stdout):
                if stream is not None:
                    stream.close()
        if answer is not None:
            return answer
        errors.seek(0)
        last = errors.read()[-2000:].decode(errors="replace").strip().rpartition("\n")[2]
    if late.is_set():
        return Answer(late=True, error="the time was up")
    return Answer(error=_ended(code, last))


def _listen(
    child: subprocess.Popen[str], request: Mapping[str, Any], tell: Callable[[str, int, int], None]
) -> Answer | None:
    """Send the request and read the lines of the child; None if it ended without an answer."""
    assert child.stdin is not None and child.stdout is not None
    try:
        child.stdin.write(json.dumps(request) + "\n")
        child.stdin.flush()
    except BrokenPipeError:
        return None
    for line in child.stdout:
        try:
            words = json.loads(line)
        except ValueError:  # cut by the end of the process
            return None
        if "progress" in words:
            tell(*words["progress"])
        elif "error" in words:
            return Answer(error=str(words["error"]), final=bool(words["final"]))
        else:
            return Answer(result=words["result"])
    return None


def _interrupt(child: subprocess.Popen[str], late: threading.Event) -> None:
    """Interrupt the child: a conversion then leaves its work folder for the next run."""
    late.set()
    _stop(child)


def _stop(child: subprocess.Popen[str]) -> None:
    """End the child by an interrupt; by a kill if that takes too long."""
    if child.poll() is not None:
        return
    child.send_signal(signal.SIGINT)
    try:
        child.wait(_PATIENCE)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _ended(code: int, last: str) -> str:
    """The reason of an end without an answer."""
    if code == -signal.SIGKILL:
        return "the process was killed (signal 9), probably for lack of memory"
    if code < 0:
        return f"the process ended by signal {-code}"
    return f"the process failed: {printable(last)}" if last else f"the process ended with status {code}"
