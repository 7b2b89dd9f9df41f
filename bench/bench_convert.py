"""Convert a 1B Llama from a bf16 folder to GGUF with two threads, against plain reading and writing of the same bytes.

Each side runs in its own process, so that peak memory is separate; they alternate. The folder is created once, in a
temporary directory.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from measure import Row, Section
from synthetic import write_llama

BAR_TIMES = 1.5
BAR_MB = 500.0
REPEATS = 3

CONVERT = """
import sys, polyquant
polyquant.convert(sys.argv[1], sys.argv[2], codec=sys.argv[3], threads=2)
"""
PEAK = """
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
"""  # getrusage would include the memory of the parent process
READ_WRITE = """
import os, sys
block, left = 1 << 22, int(sys.argv[3])
weights = sys.argv[1] + "/model.safetensors"
with open(weights, "rb", buffering=0) as source, open(sys.argv[2], "wb", buffering=0) as target:
    buffer = bytearray(block)
    while source.readinto(buffer):
        if left > 0:
            left -= target.write(memoryview(buffer)[: min(left, block)])
    while left > 0:
        left -= target.write(memoryview(buffer)[: min(left, block)])
    os.fsync(target.fileno())
"""


def timed(code: str, *args: str) -> tuple[float, float]:
    """Return (wall seconds, peak MB) of a Python process; the target file is removed first."""
    Path(args[1]).unlink(missing_ok=True)
    env = {
        k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"
    }  # as for an installed package, which is compiled
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", code + PEAK, *args], stdout=subprocess.PIPE, text=True, check=False, env=env
    )
    seconds = time.perf_counter() - start
    if done.returncode:
        raise SystemExit(f"the measured process failed: {code}")
    return seconds, int(done.stdout.split()[-1]) / 1e3


def rows() -> Iterator[Row]:
    """Compare seconds with plain reading and writing, and peak memory with 500 MB.

    `weights`: million weights per second.
    """
    with tempfile.TemporaryDirectory(dir=os.environ.get("POLYQUANT_BENCH_DIR")) as place:
        source, target = Path(place) / "llama-1b", str(Path(place) / "out.gguf")
        nbytes = write_llama(source)
        for codec, bar in (("q8_0", BAR_TIMES), ("q4_k", None)):
            ours, plain, memory = [], [], 0.0
            timed(CONVERT, str(source), target, codec)
            size = Path(target).stat().st_size
            for _ in range(REPEATS):
                seconds, peak = timed(CONVERT, str(source), target, codec)
                ours.append(seconds)
                memory = max(memory, peak)
                plain.append(timed(READ_WRITE, str(source), target, str(size))[0])
            a, b = median(ours), median(plain)
            # As a ratio to the bar: 1.5 times the read-and-write time is 1.0
            yield Row(
                f"bf16 > {codec}", "s", a, b, 1 / bar if bar else None, extra={"M weights/s": nbytes / 2 / a / 1e6}
            )
            yield Row(f"bf16 > {codec}, peak memory", "MB", memory, BAR_MB, 1.0)


SECTION = Section(
    "convert a 1B Llama, two threads, against plain reading and writing (bar: 1.5 times their time)", rows
)
