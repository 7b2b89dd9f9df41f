"""Run fuzz targets: coverage-guided with atheris, or (--plain, or without it) from the seeds with the mutators alone.

    PYTHONPATH=tests python -m fuzz.run --runs 100000 gguf safetensors     (all targets without names)
    PYTHONPATH=tests python -m fuzz.run --input FILE gguf                  one input

Every input is limited to SECONDS of processor time and MEMORY more address space than the start needed. A finding ends
the run with a traceback; the input is saved in the folder printed before it.
"""

from __future__ import annotations

import argparse
import importlib.util
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

SECONDS = 5
STUCK = 3600
"""Seconds of wall-clock time after which an input that does not return to Python is a finding; a run may be paused."""
MEMORY = 1 << 30
LARGEST = 60_000
"""Maximum size of an input."""
CHUNK = 20_000
"""Executions of one process: libFuzzer ends its process, and atheris leaks about 27 KB per execution."""
CORPUS = Path(__file__).parent / "corpus"
"""Inputs that failed once: CORPUS/TARGET/NAME."""


def limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY,) * 2)


def too_slow(*_: object) -> None:
    raise AssertionError(f"more than {SECONDS} s of processor time")


def scratch() -> Path:
    memory = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix="fuzz-", dir=memory if memory.is_dir() else None))


def inputs(name: str, target: Any) -> list[bytes]:
    """The seeds and the inputs that failed once."""
    return [*target.seeds(), *(p.read_bytes() for p in sorted((CORPUS / name).glob("*")))]


def plain(name: str, runs: int, seed: int) -> tuple[int, int]:
    """Run the seeds and `runs` mutations of them. Returns (executions, accepted inputs)."""
    from fuzz.targets import TARGETS

    target, rng, folder = TARGETS[name], Random(f"{name} {seed}"), scratch()
    pool = inputs(name, target)
    first = len(pool)
    target.run(pool[0], folder)  # imports
    limit_memory()
    accepted = 0
    for i in range(first + runs):
        data = pool[i] if i < first else target.mutate(rng.choice(pool), rng)[:LARGEST]
        began = time.process_time()
        try:
            accepted += target.run(data, folder)
            took = time.process_time() - began
            assert took < SECONDS, f"{took:.1f} s"
        except BaseException:
            failed = Path(f"failed-{name}")
            failed.write_bytes(data)
            print(f"{name}: execution {i} of seed {seed} failed; its input is in {failed.resolve()}", file=sys.stderr)
            raise
        if i >= first and len(pool) < 200 and rng.random() < 0.02:
            pool.append(data)
    shutil.rmtree(folder)
    return first + runs, accepted


def guided(name: str, runs: int, seed: int, corpus: Path) -> None:
    """Run atheris; does not return. New inputs are kept in the folder `corpus`, if it is given."""
    import atheris

    folder = scratch()
    corpus.mkdir(parents=True, exist_ok=True)
    with atheris.instrument_imports(include=["polyquant"]):
        from fuzz.targets import TARGETS

        target = TARGETS[name]
        for i, data in enumerate(inputs(name, target)):
            (corpus / f"seed-{i}").write_bytes(data[:LARGEST])
            target.run(data, folder)  # most modules are imported on first use

    def mutate(data: bytes, most: int, number: int) -> bytes:
        rng = Random(number)
        new = target.mutate(data, rng) if rng.random() < 0.8 else atheris.Mutate(data, most)
        return bytes(new[:most])

    def one(data: bytes) -> None:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        target.run(data, folder)
        signal.setitimer(signal.ITIMER_PROF, 0)

    signal.signal(signal.SIGPROF, too_slow)
    limits = [
        f"-max_len={LARGEST}",
        f"-timeout={STUCK}",
        "-rss_limit_mb=2048",
        f"-artifact_prefix={corpus.parent}/{name}-",
    ]
    progress = ["-print_final_stats=1", "-verbosity=1", f"-seed={seed}", f"-runs={runs}"]
    atheris.Setup([name, *limits, *progress, str(corpus)], one, custom_mutator=mutate)
    limit_memory()
    atheris.Fuzz()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*")
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plain", action="store_true", help="without atheris")
    parser.add_argument("--input", type=Path, help="run one input")
    parser.add_argument("--corpus", type=Path, default=Path(tempfile.gettempdir()) / "polyquant-fuzz")
    given = parser.parse_args()
    if given.input is not None:
        from fuzz.targets import TARGETS

        print("accepted" if TARGETS[given.targets[0]].run(given.input.read_bytes(), scratch()) else "refused")
        return
    unguided = given.plain or importlib.util.find_spec("atheris") is None
    if not unguided and len(given.targets) == 1 and given.runs <= CHUNK:
        guided(given.targets[0], given.runs, given.seed, given.corpus / given.targets[0])
    if unguided:
        from fuzz.targets import TARGETS

        for name in given.targets or TARGETS:
            began = time.process_time()
            done, accepted = plain(name, given.runs, given.seed)
            print(f"{name}: {done} executions, {accepted} accepted, {time.process_time() - began:.1f} s", flush=True)
        return
    from fuzz.targets import TARGETS

    for name in given.targets or TARGETS:
        for i, done in enumerate(range(0, given.runs, CHUNK)):
            runs = min(CHUNK, given.runs - done)
            options = ["--runs", str(runs), "--seed", str(given.seed + i), "--corpus", str(given.corpus)]
            subprocess.run([sys.executable, "-m", "fuzz.run", *options, name], check=True)
            print(f"== {name}: {done + runs} executions", flush=True)


if __name__ == "__main__":
    main()
