"""Run a program of this package on untrusted input, in a separate process (chat_child.py, grammar_child.py).

The process limits its own processor time and memory, and starts without site-packages, environment or core dumps.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import subprocess

__all__ = ["folders_of", "run_limited"]

_WALL = 10.0
"""Seconds until the process is killed, for machines too busy to give it processor time."""
_KEPT = ("LD_LIBRARY_PATH", "TZ")
"""The only environment variables passed on: the process needs them to start and to tell the time."""


def run_limited(program: Path, job: Mapping[str, Any]) -> subprocess.CompletedProcess[bytes]:
    """Return the ended process; job: its stdin, as JSON. Raises subprocess.TimeoutExpired."""
    command = [sys.executable, "-I", "-S", str(program)]
    environment = {k: os.environ[k] for k in _KEPT if k in os.environ}
    import subprocess  # 10 ms, which other runs do not need

    return subprocess.run(  # noqa: S603 - our own program under our own interpreter
        command, input=json.dumps(job).encode(), capture_output=True, timeout=_WALL, env=environment, check=False
    )


def folders_of(packages: Sequence[str]) -> list[str] | None:
    """Return the folders of packages, found without importing them; None if one is not installed."""
    folders = []
    for package in packages:
        spec = find_spec(package)
        if spec is None or spec.origin is None:
            return None
        folders.append(str(Path(spec.origin).parent.parent))
    return list(dict.fromkeys(folders))
