"""Measure `polyquant inspect` and the first screen of `polyquant browse` with its tensors, each as a new process.

The screen is that of a pseudo-terminal: the time ends when the name of the first tensor arrives there.
"""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from large_models import KIMI_K2, LLAMA_405B, deepseek_shapes, llama_shapes, write_sparse
from measure import Row, Section, in_turn

_PATIENCE = 60.0
_RUN = [sys.executable, "-m", "polyquant"]


def first_screen(model: Path, until: bytes) -> float:
    """Return the seconds from the start of the process until `until` appears on its screen."""
    began = time.perf_counter()
    pid, fd = pty.fork()
    if pid == 0:
        os.environ.update({"TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"})
        os.execv(sys.executable, [*_RUN, "browse", str(model)])
    shown = b""
    while until not in shown:
        if not select.select([fd], [], [], _PATIENCE)[0]:
            raise TimeoutError(f"no {until!r} on the screen after {_PATIENCE:g} s")
        shown += os.read(fd, 1 << 16)
    seconds = time.perf_counter() - began
    os.write(fd, b"q")
    while select.select([fd], [], [], _PATIENCE)[0]:
        try:
            if not os.read(fd, 1 << 16):
                break
        except OSError:  # the program has ended
            break
    os.waitpid(pid, 0)
    os.close(fd)
    return seconds


def rows() -> Iterator[Row]:
    """Compare with the bars in ms; `python`: an interpreter without any program."""
    with tempfile.TemporaryDirectory() as folder:
        small, large = Path(folder, "small"), Path(folder, "large")
        config = {**LLAMA_405B, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 44}
        tensors = write_sparse(small, config, llama_shapes(config))

        def run(*words: str) -> None:
            subprocess.run([*words], check=True, stdout=subprocess.DEVNULL)

        bare, inspected = in_turn(lambda: run(sys.executable, "-c", ""), lambda: run(*_RUN, "inspect", str(small)))
        extra = {"python": 1e3 * bare}
        yield Row(f"inspect, {tensors} tensors", "ms", 1e3 * inspected, 400.0, 1.0, extra=extra)
        if find_spec("textual") is None:
            return
        seconds = sorted(first_screen(small, b"embed_tokens") for _ in range(10))[5]
        yield Row(f"browse, first screen with {tensors} tensors", "ms", 1e3 * seconds, 500.0, 1.0, extra=extra)
        many = write_sparse(large, KIMI_K2, deepseek_shapes(KIMI_K2))
        yield Row(f"browse, {many:,} tensors of 205 files", "ms", 1e3 * first_screen(large, b"embed_tokens"))


SECTION = Section("inspect and browse, whole processes, against 400 and 500 ms", rows)
