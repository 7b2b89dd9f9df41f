"""Convert in 1, 2 and 4 processes at once (--part I/N --threads 1, then merge), against the time that `polyquant plan
--simulate` predicts from the plan. Four processes share the cores of this machine if it has fewer.

Run it on a quiet machine: the prediction is for idle cores.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from measure import Row, Section
from synthetic import LLAMA_1B, write_llama

BAR = 20.0
"""Percent of the measured time by which the prediction may differ."""
REPEATS = 3
LARGE = {**LLAMA_1B, "num_hidden_layers": 6, "vocab_size": 16000}
SMALL = {
    **LLAMA_1B, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 2, "num_attention_heads": 16,
    "vocab_size": 8000,
}  # fmt: skip
JOBS = {
    "q8_0": (LARGE, "out.gguf", ["--codec", "q8_0"]),
    "q4_k_m": (LARGE, "out.gguf", ["--recipe", "q4_k_m"]),
    "trellis 3 bits, fast": (SMALL, "out", ["--bits", "3", "--effort", "fast"]),
}
ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}  # as for an installed package
POLYQUANT = [sys.executable, "-c", "from polyquant.cli import main; main()"]


def cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def predicted(source: Path, target: Path, options: list[str], processes: int) -> float:
    """Return the seconds that `plan` predicts."""
    machine = ["--simulate", f"1,{cores()},0,0", "--spread", "0", "--workers", str(processes), "--threads", "1"]
    command = [*POLYQUANT, "plan", str(source), str(target), *options, *machine, "--format", "json"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=ENVIRONMENT)
    return json.loads(done.stdout)["simulation"]["seconds"]


def measured(source: Path, target: Path, options: list[str], processes: int) -> float:
    """Return the seconds of all processes and the merge."""
    shutil.rmtree(target) if target.is_dir() else target.unlink(missing_ok=True)
    command = [*POLYQUANT, "convert", str(source), str(target), *options, "--threads", "1"]
    quiet = {"stdout": subprocess.DEVNULL, "env": ENVIRONMENT}
    start = time.perf_counter()
    if processes == 1:
        subprocess.run(command, check=True, **quiet)
    else:
        parts = [subprocess.Popen([*command, "--part", f"{i + 1}/{processes}"], **quiet) for i in range(processes)]
        codes = [p.wait() for p in parts]
        if any(codes):
            raise SystemExit("a part failed")
        subprocess.run([*POLYQUANT, "merge", str(target)], check=True, **quiet)
    return time.perf_counter() - start


def rows() -> Iterator[Row]:
    """Compare the prediction with the measured seconds."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("POLYQUANT_BENCH_DIR")) as place:
        for job, (config, name, options) in JOBS.items():
            source, target = Path(place) / f"source-{config['hidden_size']}", Path(place) / name
            if not source.exists():
                write_llama(source, config)
            measured(source, target, options, 1)  # not counted: fills the page cache
            for processes in (1, 2, 4):
                seconds, expected = [], []
                for _ in range(REPEATS):
                    expected.append(predicted(source, target, options, processes))
                    seconds.append(measured(source, target, options, processes))
                a, b = median(seconds), median(expected)
                yield Row(
                    f"{job}, {processes} processes", "% off", 100 * abs(b - a) / a, BAR, 1.0,
                    extra={"measured s": a, "predicted s": b, "predicted / measured": b / a},
                )  # fmt: skip


SECTION = Section("predicted time of 1, 2 and 4 processes, against the measured (bar: within 20 %)", rows)
