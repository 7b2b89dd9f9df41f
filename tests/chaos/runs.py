"""Runs of a small job on a Dask cluster whose workers and drivers are killed at random, with faulty storage.

    PYTHONPATH=src:tests python -m chaos.runs 300

Prints a line per run and ends with exit code 1 if any output differs from that of one process, or something partial was
visible.
"""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from golden import VECTORS

SOURCE = VECTORS / "models/tiny-llama-tied/hf"
JOBS = {
    "gguf": ("m.gguf", ("--recipe", "q4_k_m")),
    "split": ("m.gguf", ("--codec", "q8_0", "--shard-size", "150000")),
    "folder": ("out", ("--to", "hf", "--codec", "f16", "--shard-size", "200000")),
    "trellis": ("out", ("--to", "trellis-v3", "--bits", "3", "--effort", "fast")),
}
PROGRAM = (sys.executable, "-m", "polyquant", "quantize", str(SOURCE))
_LEFT = 120.0
"""Seconds after which a driver hangs."""


@dataclass
class Result:
    """One run: how many drivers and workers were killed, and complaints."""

    drivers: int
    workers: int
    wrong: list[str]


def digest(folder: Path) -> dict[str, str]:
    """Digests of the visible files: work folders are left out."""
    files = (p for p in sorted(folder.rglob("*")) if p.is_file() and ".polyquant-" not in str(p.relative_to(folder)))
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


class Cluster:
    """A Dask scheduler and workers, each a process; a worker that ended is started again."""

    def __init__(self, folder: Path, workers: int) -> None:
        file = folder / "scheduler.json"
        self._scheduler = self._start("scheduler", "--scheduler-file", str(file), "--no-dashboard", "--port", "0")
        while not file.exists() or not file.stat().st_size:
            time.sleep(0.1)
        self.address = json.loads(file.read_text())["address"].removeprefix("tcp://")
        self._folder, self._closed = folder, threading.Event()
        self._workers = [self._worker() for _ in range(workers)]
        self._supervisor = threading.Thread(target=self._supervise)
        self._supervisor.start()

    def _start(self, what: str, *options: str) -> subprocess.Popen[bytes]:
        words = (sys.executable, "-m", f"distributed.cli.dask_{what}", *options)
        return subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def _worker(self) -> subprocess.Popen[bytes]:
        faults = ("--preload", str(Path(__file__).with_name("faults.py")))
        alone = ("--no-nanny", "--nthreads", "1", "--no-dashboard", "--memory-limit", "0")
        return self._start("worker", self.address, *alone, "--local-directory", str(self._folder / "dask"), *faults)

    def _supervise(self) -> None:
        while not self._closed.wait(0.2):
            self._workers = [p if p.poll() is None else self._worker() for p in self._workers]

    def kill_one(self, rng: random.Random) -> None:
        """Kill a random worker."""
        rng.choice(self._workers).kill()

    def close(self) -> None:
        """End all processes."""
        self._closed.set()
        self._supervisor.join()
        for process in (*self._workers, self._scheduler):
            process.kill()
            process.wait()


def command(cluster: Cluster, target: Path, options: tuple[str, ...], workers: int) -> tuple[str, ...]:
    """The command of a driver."""
    engine = ("--engine", "dask", "--workers", str(workers), "--address", cluster.address)
    return (*PROGRAM, str(target), *options, *engine)


def run(
    cluster: Cluster, top: Path, job: str, whole: dict[str, str], seconds: float, rng: random.Random
) -> Result:  # fmt: skip
    """Repeat one command until it ends by itself. seconds: of an undisturbed run; up to three workers and two drivers
    are killed within about twice this time.
    """
    name, options = JOBS[job]
    words = command(cluster, top / name, options, rng.randrange(4, 9))
    result, done = Result(0, 0, []), threading.Event()
    kills = sorted(rng.uniform(0, 2 * seconds) for _ in range(rng.randrange(4)))
    drivers = [rng.uniform(0.3, 1.2 * seconds) for _ in range(rng.randrange(3))]

    def kill_workers() -> None:
        for before, after in pairwise((0.0, *kills)):
            if done.wait(after - before):
                return
            cluster.kill_one(rng)
            result.workers += 1

    killer = threading.Thread(target=kill_workers)
    killer.start()
    try:
        for limit in (*drivers, *[_LEFT] * 6):
            driver = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            try:
                _, err = driver.communicate(timeout=limit)
            except subprocess.TimeoutExpired:
                driver.kill()
                driver.communicate()
                result.drivers += 1
                if (seen := digest(top)) and seen != whole:
                    result.wrong.append(f"partly visible after a kill: {sorted(seen)}")
                if limit == _LEFT:
                    result.wrong.append("a driver hangs")
                continue
            if driver.returncode == 0 or "target exists" in err:
                break
            if "Traceback" in err or "same command resumes" not in err:
                result.wrong.append(f"exit {driver.returncode}: {err[-500:]}")
        else:
            result.wrong.append("six attempts were not enough")
    finally:
        done.set()
        killer.join()
    if digest(top) != whole:
        result.wrong.append("other bytes than in one process")
    if left := [p.name for p in top.iterdir() if ".polyquant-" in p.name]:
        result.wrong.append(f"left behind: {left}")
    return result


def main(runs: int, seed: int = 0) -> list[Result]:
    """Do `runs` runs, the jobs in turn."""
    rng, out = random.Random(seed), []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        whole = {}
        for job, (name, options) in JOBS.items():
            (folder / job).mkdir()
            subprocess.run([*PROGRAM, str(folder / job / name), *options], check=True, stdout=subprocess.DEVNULL)
            whole[job] = digest(folder / job)
        cluster = Cluster(folder, 8)
        try:
            words = command(cluster, folder / "first.gguf", (), 4)
            subprocess.run(words, check=True, stdout=subprocess.DEVNULL)  # the workers have started
            started = time.monotonic()
            subprocess.run([*words, "--overwrite"], check=True, stdout=subprocess.DEVNULL)
            seconds = time.monotonic() - started
            print(f"an undisturbed run: {seconds:.1f} s", flush=True)
            for i in range(runs):
                job, top = list(JOBS)[i % len(JOBS)], folder / f"run{i}"
                top.mkdir()
                started = time.monotonic()
                out.append(run(cluster, top, job, whole[job], seconds, rng))
                r = out[-1]
                print(
                    f"{i} {job}: killed {r.drivers} drivers, {r.workers} workers; {time.monotonic() - started:.1f} s",
                    *r.wrong, sep="; ", flush=True,
                )  # fmt: skip
        finally:
            cluster.close()
    return out


if __name__ == "__main__":
    found = main(int(sys.argv[1]))
    killed = f"{sum(r.drivers for r in found)} drivers and {sum(r.workers for r in found)} workers"
    print(f"{len(found)} runs, killed {killed}, {sum(bool(r.wrong) for r in found)} wrong")
    sys.exit(any(r.wrong for r in found))
