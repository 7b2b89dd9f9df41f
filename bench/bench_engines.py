"""Engines and parts: Ray with two workers against one, the cost of being divided, and jobs of 70,000 tensors.

The overhead compares two parts and their merge, each with one thread, with one process of two threads.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import large_models
from measure import Row, Section
from synthetic import LLAMA_1B, write_llama

SMALL = {
    **LLAMA_1B, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 6, "num_attention_heads": 16,
    "vocab_size": 8000,
}  # fmt: skip
LARGE = {**LLAMA_1B, "num_hidden_layers": 6, "vocab_size": 16000}
THIN = {
    **large_models.KIMI_K2, "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32,
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
    "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 64,
}  # fmt: skip
"""The tensors of Kimi-K2, each of a few kilobytes."""
ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
PROGRAM = """
import sys
from polyquant.cli import main
try:
    main(sys.argv[1:])
finally:
    with open("/proc/self/status") as status:
        peak = next(line for line in status if line.startswith("VmHWM")).split()[1]
    print(peak, file=sys.stderr)
"""
REPEATS = 3


def command(*words: object) -> list[str]:
    """Return a command of polyquant that prints its peak memory in KiB on stderr."""
    return [sys.executable, "-c", PROGRAM, *map(str, words)]


def run(*words: object) -> tuple[float, float]:
    """Return the seconds and the peak memory in MB of one command."""
    start = time.perf_counter()
    done = subprocess.run(
        command(*words), check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=ENVIRONMENT
    )
    return time.perf_counter() - start, int(done.stderr.split()[-1]) * 1024 / 1e6


def cleared(target: Path) -> Path:
    """Remove a target of an earlier run."""
    shutil.rmtree(target) if target.is_dir() else target.unlink(missing_ok=True)
    return target


def in_parts(source: Path, target: Path, *options: str) -> float:
    """Return the seconds of two parts at once and their merge."""
    start = time.perf_counter()
    words = [command("quantize", source, target, *options, "--threads", 1, "--part", f"{i}/2") for i in (1, 2)]
    parts = [subprocess.Popen(w, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=ENVIRONMENT) for w in words]
    codes = [p.wait() for p in parts]
    if any(codes):
        raise SystemExit("a part failed")
    run("merge", target)
    return time.perf_counter() - start


def rows() -> Iterator[Row]:
    """Measure as whole commands, including the start of all processes."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("POLYQUANT_BENCH_DIR")) as scratch:
        place = Path(scratch)
        write_llama(place / "large", LARGE)
        for name, options in (("q8_0", ["--codec", "q8_0"]), ("q4_k_m", ["--recipe", "q4_k_m"])):
            one, two = [], []
            for _ in range(REPEATS):
                target = place / "out.gguf"
                one.append(run("quantize", place / "large", cleared(target), *options, "--threads", 2)[0])
                two.append(in_parts(place / "large", cleared(target), *options))
            yield Row(f"two parts and merge, against two threads: {name}", "s", median(two), median(one), 1 / 1.05)
        write_llama(place / "small", SMALL)
        target, options = place / "out", ("--bits", 3)
        one = run("quantize", place / "small", cleared(target), *options, "--threads", 2)[0]
        two = in_parts(place / "small", cleared(target), *options)
        yield Row("two parts and merge, against two threads: trellis", "s", two, one, 1 / 1.05)
        yield from _engines(place)
        yield from _many_tensors(place)
        large_models.write_model("llama-405b", place / "llama-405b")
        part = run(
            "quantize", place / "llama-405b", cleared(place / "out.gguf"), "--codec", "q4_0", "--part", "500/1000"
        )
        yield Row("part 500/1000 of 0.8 TB, peak memory against 150 MB", "MB", part[1], 150.0, 1.0)


def _engines(place: Path) -> Iterator[Row]:
    for engine, module in (("ray", "ray"), ("dask", "distributed")):
        if find_spec(module) is None:
            continue
        seconds = []
        for workers in (1, 2):
            options = ("--bits", 3, "--engine", engine, "--workers", workers)
            seconds.append(run("quantize", place / "small", cleared(place / "out"), *options)[0])
        yield Row(f"{engine}: trellis with two workers, against one", "s", seconds[1], seconds[0], 1.8)


def _many_tensors(place: Path) -> Iterator[Row]:
    large_models.SHARD = 20_000_000
    large_models.write_sparse(place / "thin", THIN, large_models.deepseek_shapes(THIN))
    options = ("--to", "hf", "--codec", "f16")
    for i in (1, 2):
        run("convert", place / "thin", cleared(place / "out"), *options, "--part", f"{i}/2")
    seconds, peak = run("merge", place / "out")
    yield Row("merge of 70,000 tensors, against 10 s", "s", seconds, 10.0, 1.0, extra={"MB": peak})
    if find_spec("distributed") is not None:
        more = ("--engine", "dask", "--workers", 2)
        seconds, peak = run("convert", place / "thin", cleared(place / "out"), *options, *more)
        yield Row("driver of 70,000 tensors, peak memory against 300 MB", "MB", peak, 300.0, 1.0, extra={"s": seconds})


SECTION = Section("parts and engines", rows, peers=("ray", "dask"))
