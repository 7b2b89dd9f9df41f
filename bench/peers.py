"""Peers that are installed: Python packages, and llama-bench of llama.cpp and of ik_llama.cpp.

llama-bench is taken from the folder in LLAMA_CPP, else from PATH; that of ik_llama.cpp, a fork with a program of the
same name, from the folder in IK_LLAMA_CPP. It stands in for llama-cpp-python, whose library can measure more.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

__all__ = ["PROGRAMS", "llama_bench", "program", "release"]

PROGRAMS = {"llama.cpp": "LLAMA_CPP", "ik_llama.cpp": "IK_LLAMA_CPP"}
"""Environment variables that name the folder of each llama-bench."""


@cache
def release(peer: str) -> str | None:
    """Return the installed version of a peer: of a package, or of a llama-bench; None if there is none."""
    if peer in PROGRAMS:
        found = program(peer)
        return None if found is None else f"llama-bench in {found.parent}"
    try:
        return version(peer)
    except PackageNotFoundError:
        return None


def program(peer: str) -> Path | None:
    """Return the llama-bench of a peer of PROGRAMS, None if there is none."""
    folder = os.environ.get(PROGRAMS[peer])
    if folder is None and peer != "llama.cpp":
        return None
    found = shutil.which("llama-bench", path=folder)
    return None if found is None else Path(found)


def llama_bench(path: Path, file: Path, threads: int, prefill: int, decode: int) -> dict[str, float]:
    """Return tokens per second of a run of llama-bench: `decode`, and `prefill` if it is not 0.

    Raises RuntimeError if it fails or prints something else.
    """
    sizes = ["-p", str(prefill), "-n", str(decode), "-t", str(threads)]
    done = subprocess.run(
        [path, "-m", file, *sizes, "-r", "1", "-o", "json"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{path} on {file.name}: {done.stderr.strip().splitlines()[-1:]}")
    try:
        tests = json.loads(done.stdout)
        return {"decode" if test["n_gen"] else "prefill": float(test["avg_ts"]) for test in tests}
    except (ValueError, KeyError, TypeError) as problem:
        raise RuntimeError(f"{path} printed no figures: {problem}") from None
