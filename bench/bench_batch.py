"""Decode several streams together: tokens per second of 1, 2, 4 and 8 streams of a 1B Llama, against llama.cpp."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import polyquant
from bench_run import MODELS, llama
from measure import Row, Section
from polyquant.ops import native

HERE = Path(__file__).resolve().parent
STREAMS = (1, 2, 4, 8)
THREADS, STEPS, ROUNDS = 2, 16, 3


def w8a8() -> Path:
    """Return the 1B Llama as an msModelSlim folder with int8 weights and dynamic int8 activations."""
    llama("q4_k")  # writes the source
    folder = MODELS / "llama-1b-w8a8"
    if not folder.exists():
        polyquant.quantize(MODELS / "llama-1b", folder, to="msmodelslim", codec="w8a8.dynamic", measure=False)
    return folder


def child(engine: str, path: Path, streams: tuple[int, ...]) -> dict[int, float]:
    """Return tokens per second by number of streams, measured in one process."""
    done = subprocess.run(
        [sys.executable, HERE / "batch_child.py", engine, path, *map(str, (THREADS, STEPS, *streams))],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{engine} on {path.name}: {done.stderr.strip().splitlines()[-1:]}")
    return {int(n): rate for n, rate in json.loads(done.stdout.splitlines()[-1]).items()}


def compared(label: str, path: Path, peer: Path | None) -> Iterator[Row]:
    """Yield a row per number of streams, and the gain of eight over one."""
    ours, theirs = [], []
    for _ in range(ROUNDS):
        ours.append(child("ours", path, STREAMS))
        if peer is not None and find_spec("llama_cpp") is not None:
            theirs.append(child("llama.cpp", peer, STREAMS))
    for n in STREAMS:
        rate = median(run[n] for run in ours)
        yield Row(
            f"{label}, {n} streams", "tokens/s", rate, median(r[n] for r in theirs) if theirs else None, None, True
        )
    yield gain(label, ours, 3.0 if "AVX-512" in native.instruction_set() else 2.0)


def gain(label: str, runs: list[dict[int, float]], bar: float) -> Row:
    """Return the row of eight streams against one."""
    one, eight = (median(run[n] for run in runs) for n in (1, 8))
    return Row(f"{label}, 8 streams, peer: 1 stream", "tokens/s", eight, one, bar, True)


def rows() -> Iterator[Row]:
    """Bars: eight streams give 3 times the tokens per second of one with AVX-512, twice with AVX2."""
    for codec in ("q4_k", "q8_0"):
        yield from compared(codec, llama(codec), llama(codec))
    yield from compared("w8a8.dynamic", w8a8(), None)
    if "AVX-512" in native.instruction_set():
        for codec in ("q4_k", "q8_0"):
            runs = [child("ours-avx2", llama(codec), (1, 8)) for _ in range(ROUNDS)]
            yield gain(f"{codec}, AVX2", runs, 2.0)


SECTION = Section("decode several streams of a 1B Llama together, against llama.cpp", rows, peers=("llama-cpp-python",))
