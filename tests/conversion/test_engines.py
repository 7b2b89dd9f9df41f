"""Workers of an engine: the bytes of one process, also if workers end, hang or are slow; errors end the job."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

import pytest

import polyquant as pq
from conversion.jobs import JOBS, SOURCE, content
from polyquant.conversion.engines import cluster as clusters
from polyquant.conversion.engines import driver, worker
from polyquant.conversion.engines.cluster import WorkerLostError
from polyquant.conversion.engines.worker import UnitRunner
from polyquant.conversion.execute import Engine
from polyquant.errors import InputError, PlanError, UnknownNameError, UnsupportedError


class Threads:
    """A cluster of threads. `fault(number of the unit)` is called in the worker: it may raise, or wait."""

    def __init__(self, assignment, workers, fault):
        self.size, self._assignment, self._fault = workers, assignment, fault
        self._pool = ThreadPoolExecutor(4 * workers + 4)
        self._runners: dict[int, UnitRunner] = {}
        self.replaced: list[int] = []
        self.units: list[clusters.Unit] = []
        self.workers_exist = True

    def ready(self, slot):
        return self.workers_exist

    def submit(self, slot, unit) -> Future:
        runner = self._runners.setdefault(slot, UnitRunner(self._assignment))
        self.units.append(unit)
        number = len(self.units)

        def work():
            self._fault(number)
            return runner.run(unit)

        return self._pool.submit(work)

    def wait(self, handles, timeout):
        return list(wait(handles, timeout, FIRST_COMPLETED).done)

    def result(self, handle):
        return handle.result()

    def replace(self, slot):
        self.replaced.append(slot)
        self._runners.pop(slot, None)

    def close(self):
        self._pool.shutdown(wait=False, cancel_futures=True)


@pytest.fixture
def threads(monkeypatch):
    """Use a cluster of threads for the engine "ray": call it with the fault, it returns the list of clusters."""
    made: list[Threads] = []

    def use(fault=lambda number: None):
        def cluster_named(name, assignment, *, workers, address):
            made.append(Threads(assignment, workers, fault))
            return made[-1]

        monkeypatch.setattr(clusters, "cluster_named", cluster_named)
        return made

    monkeypatch.setattr(driver, "_TICK", 0.02)
    monkeypatch.setattr("polyquant.conversion.engines.worker.kernel_threads", _unchanged)
    return use


class _unchanged:
    """The thread count is a setting of the process, which these workers share."""

    def __init__(self, count):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


def convert(folder: Path, job: str = "gguf", engine: Engine | None = None, **more) -> dict[str, bytes]:
    folder.mkdir(exist_ok=True)
    name, options = JOBS[job]
    pq.convert(SOURCE, folder / name, **options, engine=engine, **more)
    return content(folder)


@pytest.mark.parametrize("job", JOBS)
def test_workers_write_the_bytes_of_one_process(job, threads, tmp_path):
    (tmp_path / "one").mkdir()
    events = []
    made = threads()
    many = convert(tmp_path / "many", job, Engine("ray", 3), on_progress=events.append)
    assert many == convert(tmp_path / "one", job)
    assert events[-1].done == events[-1].total and len(made[0].units) > 3


@pytest.mark.parametrize("seed", range(5))
def test_lost_workers_are_replaced(seed, threads, tmp_path):
    rng = random.Random(seed)

    def fault(number):
        if number == 1 or (number < 12 and rng.random() < 0.4):
            raise WorkerLostError("gone")

    made = threads(fault)
    assert convert(tmp_path / "many", engine=Engine("ray", 3)) == convert(tmp_path / "one")
    assert made[0].replaced


def test_a_hanging_worker_is_replaced(threads, tmp_path):
    release = threading.Event()
    made = threads(lambda number: number == 2 and release.wait(20))
    report = convert(tmp_path / "many", engine=Engine("ray", 2, lease=0.3), on_progress=lambda e: None)
    release.set()
    assert report == convert(tmp_path / "one") and made[0].replaced


def test_an_idle_worker_repeats_a_straggler(threads, tmp_path, monkeypatch):
    """The last unit is slow; an idle worker finishes it long before its lease ends."""
    release = threading.Event()

    def fault(number):
        if number in (5, 6):
            release.wait(20)

    monkeypatch.setattr(driver, "STRAGGLER", 1.5)
    monkeypatch.setattr(driver, "SHORTEST_STRAGGLER", 1.0)
    made = threads(fault)
    started = time.monotonic()
    many = convert(tmp_path / "many", engine=Engine("ray", 3))
    release.set()
    assert many == convert(tmp_path / "one") and time.monotonic() - started < 18
    assert len(made[0].units) > len(set(made[0].units))


def test_a_cluster_without_workers(threads, tmp_path, monkeypatch):
    monkeypatch.setattr(driver, "PATIENCE", 0.2)
    monkeypatch.setattr(Threads, "ready", lambda self, slot: False)
    threads()
    with pytest.raises(PlanError, match="the cluster has no free worker"):
        convert(tmp_path, engine=Engine("ray", 2))


def test_a_slow_worker_is_kept(threads, tmp_path, monkeypatch):
    """Only the workers that still run at the end are replaced, not the one whose unit another has done meanwhile."""
    monkeypatch.setattr(driver, "SHORTEST_STRAGGLER", 0.25)
    made = threads()
    one = convert(tmp_path / "first", engine=Engine("ray", 3))
    last = len(made[0].units)
    slow = {last - 1: 1.0, last: 2.4, last + 2: 2.4}  # the second to last is repeated at once, the last slowly
    threads(lambda number: time.sleep(slow.get(number, 0.0)))
    assert convert(tmp_path / "many", engine=Engine("ray", 3)) == one
    assert len(made[1].units) == last + 2 and len(made[1].replaced) == 1


def test_workers_that_still_run_at_the_end_are_ended(threads, tmp_path, monkeypatch):
    """The target appears only after the last worker has stopped writing to it."""
    release = threading.Event()
    monkeypatch.setattr(driver, "SHORTEST_STRAGGLER", 0.1)
    made = threads(lambda number: number == 5 and release.wait(20))
    convert(tmp_path / "many", engine=Engine("ray", 2))
    release.set()
    assert len(made[0].replaced) == 1


def test_a_unit_that_loses_every_worker_ends_the_job(threads, tmp_path):
    def fault(number):
        raise WorkerLostError("out of memory")

    threads(fault)
    with pytest.raises(PlanError, match=r"8 workers failed to convert it .*out of memory.*the same command resumes"):
        convert(tmp_path / "many", engine=Engine("ray", 2))


def test_a_killed_driver_resumes(threads, tmp_path):
    def stop(event):
        if event.done > event.total // 2:
            raise KeyboardInterrupt

    made = threads()
    with pytest.raises(KeyboardInterrupt):
        convert(tmp_path / "many", engine=Engine("ray", 2), on_progress=stop)
    made[0].close()
    again = convert(tmp_path / "many", engine=Engine("ray", 2))
    assert again == convert(tmp_path / "one")
    tensors = {index for unit in made[1].units for index, _, _ in unit}
    assert 0 < len(tensors) < len(pq.plan(SOURCE, "gguf", recipe="q4_k_m").steps)


def test_an_error_of_the_conversion_ends_the_job(threads, tmp_path):
    import numpy as np

    rng = np.random.default_rng(0)
    w = rng.normal(size=(64, 64)).astype(np.float32)
    w[3, 4] = np.nan
    pq.save({"a.weight": rng.normal(size=(64, 64)).astype(np.float32), "b.weight": w}, tmp_path / "in.gguf")
    threads()
    with pytest.raises(InputError, match=r"b\.weight.*NaN"):
        pq.convert(
            tmp_path / "in.gguf", tmp_path / "out.gguf", codec="q8_0", allow_unknown=True, engine=Engine("ray", 2)
        )
    assert [p.name for p in tmp_path.iterdir()] == ["in.gguf"]


def test_a_source_that_cannot_be_opened_for_a_moment(threads, tmp_path, monkeypatch):
    """A worker that fails to plan is retried, because the driver was able to plan."""
    one = convert(tmp_path / "one")
    failing, planned = [1, 2, 3], worker._planned

    def sometimes(request):
        if failing:
            failing.pop()
            raise InputError("config.json cannot be read: Input/output error")
        return planned(request)

    monkeypatch.setattr(worker, "_planned", sometimes)
    threads()
    assert convert(tmp_path / "many", engine=Engine("ray", 2)) == one and not failing


def test_workers_that_see_another_source_are_refused(threads, tmp_path, monkeypatch):
    threads()
    monkeypatch.setattr("polyquant.conversion.engines.worker.with_name", lambda plan, path: plan)
    with pytest.raises(PlanError, match="a worker makes another plan"):
        convert(tmp_path / "many", "gguf", Engine("ray", 2))


def test_engines_that_are_missing_or_silent(tmp_path, monkeypatch):
    with pytest.raises(UnknownNameError, match="no engine is named 'slurm'"):
        convert(tmp_path / "a", engine=Engine("slurm"))
    with pytest.raises(PlanError, match=r"no cluster answers .*127\.0\.0\.1:1.*--address"):
        convert(tmp_path / "a", engine=Engine("ray", address="127.0.0.1:1"))
    for address in ("nowhere", "host:port", "[::1"):
        with pytest.raises(PlanError, match="is not the address of a cluster"):
            convert(tmp_path / "a", engine=Engine("ray", address=address))
    monkeypatch.setitem(clusters.ENGINES, "dask", "polyquant.no_such_module:X")
    with pytest.raises(UnsupportedError, match=r"pip install 'polyquant\[dask\]'"):
        convert(tmp_path / "a", engine=Engine("dask"))
    with pytest.raises(PlanError, match="arrays in memory"):
        from polyquant.conversion.execute import execute

        plan = pq.plan(SOURCE, "gguf")
        import dataclasses

        execute(dataclasses.replace(plan, request=None), tmp_path / "x.gguf", engine=Engine("ray"))


def children(pid: int) -> list[int]:
    """All processes below a process."""
    try:
        own = [int(c) for task in Path(f"/proc/{pid}/task").iterdir() for c in (task / "children").read_text().split()]
    except OSError:
        return []
    return own + [c for child in own for c in children(child)]


def kill_one(runs: list[int], name: str):
    """After the first results: kill one worker process of ours."""

    def tell(event):
        for pid in children(os.getpid()) if not runs and event.done else []:
            if name in Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " "):
                os.kill(pid, signal.SIGKILL)
                runs.append(pid)
                return

    return tell


@pytest.mark.parametrize("engine, process", [("ray", "ray::UnitRunner"), ("dask", "spawn_main")])
def test_a_real_cluster_with_a_killed_worker(engine, process, tmp_path):
    pytest.importorskip("ray" if engine == "ray" else "distributed")
    killed: list[int] = []
    try:
        many = convert(tmp_path / "many", engine=Engine(engine, 2), on_progress=kill_one(killed, process))
    except PlanError as problem:
        if "does not start" in str(problem):  # a machine without the network interfaces or memory that it needs
            pytest.skip(str(problem))
        raise
    assert many == convert(tmp_path / "one") and killed
