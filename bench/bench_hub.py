"""Convert between the forms of the hub with equal codes, two threads, file to file, against copying the same bytes.

Each side runs in its own process, and they alternate; the copy reads the source and writes as many bytes as the target
has. Modules are loaded before the clock starts, by a conversion of a small model: that takes 0.3 s. `processor` is the
ratio of processor times, ours divided by two: on a busy machine it tells more than the seconds.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import NamedTuple

import polyquant
from measure import Row, Section
from synthetic import LLAMA_1B, write_llama

BAR_COPY = 0.8
"""Part of the speed of copying that a conversion must reach."""
BAR_INT4 = 1.3
"""Times reading and writing that rounding a 1B folder to int4 may take."""
BAR_MB = 300.0
REPEATS = 3
SMALL = {**LLAMA_1B, "num_hidden_layers": 8, "vocab_size": 8000}
FLOAT = ("*embed*=bf16", "*embd*=bf16", "output.weight=bf16", "lm_head*=bf16")
"""Linear layers only, as in published folders."""
TINY = {**SMALL, "num_hidden_layers": 1, "vocab_size": 1000}

CONVERT = """
import json, os, shutil, sys, time, polyquant
options = json.loads(sys.argv[3])
first = os.path.join(os.path.dirname(sys.argv[2]), "first-" + os.path.basename(sys.argv[2]))
polyquant.convert(sys.argv[4], first, threads=2, **options)
shutil.rmtree(first) if os.path.isdir(first) else os.unlink(first)
seconds, processor = time.perf_counter(), time.process_time()
polyquant.convert(sys.argv[1], sys.argv[2], threads=2, **options)
"""
COPY = """
import os, sys, time
from pathlib import Path
seconds, processor = time.perf_counter(), time.process_time()
block, left = 1 << 22, int(sys.argv[3])
files = [Path(sys.argv[1])] if os.path.isfile(sys.argv[1]) else sorted(p for p in Path(sys.argv[1]).iterdir())
buffer = bytearray(block)
with open(sys.argv[2], "wb", buffering=0) as target:
    for file in files:
        with open(file, "rb", buffering=0) as source:
            while count := source.readinto(buffer):
                left -= target.write(memoryview(buffer)[: max(0, min(left, count))])
    while left > 0:
        left -= target.write(memoryview(buffer)[: min(left, block)])
    os.fsync(target.fileno())
"""
FIGURES = """
seconds, processor = time.perf_counter() - seconds, time.process_time() - processor
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]
print(seconds, processor, peak)
"""


class Run(NamedTuple):
    """Wall seconds and processor seconds without the start of Python, and peak MB with it."""

    seconds: float
    processor: float
    peak: float


class Job(NamedTuple):
    """source: name of a model made by SOURCES; target: file or folder name; options: of convert."""

    source: str
    target: str
    options: dict[str, object]

    @property
    def name(self) -> str:
        """The name of the row."""
        return f"{self.source} > {self.options.get('to', self.options.get('codec'))}"


SOURCES = {
    "q4_0.gguf": {"codec": "q4_0", "rules": FLOAT},
    "q8_0.gguf": {"codec": "q8_0", "rules": FLOAT},
    "compressed.p4.g32.f16": {"to": "compressed-tensors", "codec": "compressed.p4.g32.f16"},
    "gptq.4.g128.sym": {"to": "gptq", "codec": "gptq.4.g128.sym"},
    "awq.4.g128": {"to": "awq", "codec": "awq.4.g128"},
}
JOBS = (
    Job("q4_0.gguf", "out", {"to": "compressed-tensors"}),
    Job("q4_0.gguf", "out", {"to": "gptq"}),
    Job("q4_0.gguf", "out", {"to": "awq"}),
    Job("q4_0.gguf", "out", {"to": "mlx"}),
    Job("q8_0.gguf", "out", {"to": "compressed-tensors"}),
    Job("compressed.p4.g32.f16", "out.gguf", {"codec": "q4_0", "rules": FLOAT}),
    Job("gptq.4.g128.sym", "out", {"to": "awq"}),
    Job("gptq.4.g128.sym", "out", {"to": "compressed-tensors"}),
    Job("awq.4.g128", "out", {"to": "gptq"}),
)


def measured(code: str, *args: str) -> Run:
    """Run Python code in a process; the target is removed first."""
    remove(Path(args[1]))
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}  # as for an installed package
    command = [sys.executable, "-c", code + FIGURES, *args]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=env)
    if done.returncode:
        raise SystemExit(f"the measured process failed: {args}")
    seconds, processor, peak = map(float, done.stdout.split()[-3:])
    return Run(seconds, processor, peak / 1e3)


def remove(path: Path) -> None:
    """Remove a file or folder that this benchmark wrote."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def size(path: Path) -> int:
    """Bytes of a file, or of the files of a folder."""
    return path.stat().st_size if path.is_file() else sum(p.stat().st_size for p in path.iterdir())


def compared(source: Path, target: Path, options: dict[str, object]) -> tuple[Run, Run, int]:
    """Medians of converting and copying, with the highest peak; and the bytes read and written."""
    arguments = (str(source), str(target), json.dumps(options), str(source.with_name(f"tiny-{source.name}")))
    measured(CONVERT, *arguments)  # not counted: fills the page cache
    written = size(target)
    ours, copies = [], []
    for _ in range(REPEATS):
        ours.append(measured(CONVERT, *arguments))
        copies.append(measured(COPY, str(source), str(target.with_name("copy")), str(written)))
    remove(target)
    remove(target.with_name("copy"))
    middle = (Run(median(r[0] for r in rs), median(r[1] for r in rs), max(r[2] for r in rs)) for rs in (ours, copies))
    return *middle, size(source) + written


def rows() -> Iterator[Row]:
    """Compare the speed with that of copying, and peak memory with 300 MB."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("POLYQUANT_BENCH_DIR")) as place:
        folder = Path(place) / "small"
        tiny = Path(place) / "tiny-llama-1b"
        write_llama(folder, SMALL)
        write_llama(tiny, TINY)
        for name, options in SOURCES.items():
            polyquant.convert(folder, Path(place) / name, **options)
            polyquant.convert(tiny, Path(place) / f"tiny-{name}", **options)
            for job in JOBS:
                if job.source == name:
                    ours, copy, moved = compared(Path(place) / name, Path(place) / job.target, job.options)
                    extra = {"processor": copy.processor / (ours.processor / 2)}
                    speeds = (moved / 1e9 / run.seconds for run in (ours, copy))
                    yield Row(job.name, "GB/s", *speeds, BAR_COPY, more=True, extra=extra)
                    yield Row(f"{job.name}, peak memory", "MB", ours.peak, BAR_MB, 1.0)
            remove(Path(place) / name)
        remove(folder)
        large, target = Path(place) / "llama-1b", Path(place) / "out"
        write_llama(large)
        ours, copy, _ = compared(large, target, {"to": "compressed-tensors", "codec": "compressed.p4.g128"})
        extra = {"processor": copy.processor / (ours.processor / 2)}
        yield Row("1B bf16 > compressed.p4.g128", "s", ours.seconds, copy.seconds, 1 / BAR_INT4, extra=extra)
        yield Row("1B bf16 > compressed.p4.g128, peak memory", "MB", ours.peak, BAR_MB, 1.0)


SECTION = Section("codes between hub forms, two threads, against copying the bytes (int4 of 1B: 1.3 times)", rows)
