"""A calibration shared by several processes gives the sums of one process, regardless of who computes which shard."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import polyquant as pq
from golden import VECTORS
from polyquant.calibration import shared
from polyquant.calibration.hessians import Hessians, Moments
from polyquant.calibration.shared import SharedCalibration
from polyquant.calibration.sizes import SHARD
from polyquant.calibration.stages import calibration_stages
from polyquant.calibration.statistics import CacheRanges, InputRanges

SOURCE = VECTORS / "models/tiny-llama-tied/hf"
MIXTURE = VECTORS / "architectures/mixtral"


def text(folder: Path) -> Path:
    path = folder / "text.txt"
    path.write_text(" ".join(f"and it came to pass {i} that day" for i in range(700)))
    return path


def matrices(path: Path) -> list[str]:
    return [w.name for w in pq.open(path).values() if len(w.shape) == 2 and "embed" not in w.name]


def hessians(stages, names) -> dict[str, np.ndarray | None]:
    found = Hessians(stages, names)
    return {name: found.of(name)[0] for name in sorted(names, key=found.order)}


def same(a, b) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[k], b[k]) for k in a if a[k] is not None or b[k] is not None)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray | None]:
    """The sums of one process over the text of `text`."""
    path = text(tmp_path_factory.mktemp("alone"))
    return hessians(calibration_stages(SOURCE, path), matrices(SOURCE))


@pytest.mark.parametrize("source", [SOURCE, pytest.param(MIXTURE, marks=pytest.mark.slow)], ids=["llama", "mixtral"])
def test_the_sums_of_one_process(source, tmp_path):
    alone = hessians(calibration_stages(source, text(tmp_path)), matrices(source))
    assert any(h is not None for h in alone.values())
    for _ in range(2):  # computed, then found
        calibration = SharedCalibration(tmp_path / "calibration")
        assert same(hessians(calibration.stages(source, text(tmp_path)), matrices(source)), alone)
    assert not list((tmp_path / "calibration").glob("*-shard-*"))


def test_threads_that_start_together(alone, tmp_path):
    path, names, found = text(tmp_path), matrices(SOURCE), []

    def work():
        found.append(hessians(SharedCalibration(tmp_path / "calibration").stages(SOURCE, path), names))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(found) == 4 and all(same(f, alone) for f in found)


def test_ranges_are_shared_too(tmp_path):
    path = text(tmp_path)
    own, ours = calibration_stages(SOURCE, path), SharedCalibration(tmp_path / "calibration").stages(SOURCE, path)
    for index, names in enumerate(own.names):
        caches = [CacheRanges(before=False), CacheRanges(before=False)] if index == 0 else [None, None]
        a = own.gather(index, frozenset(names), lambda _: None, InputRanges, caches[0])
        b = ours.gather(index, frozenset(names), lambda _: None, InputRanges, caches[1])
        assert a.keys() == b.keys()
        for name in a:
            assert a[name].count == b[name].count and np.array_equal(a[name].mean, b[name].mean)
            assert all(map(np.array_equal, a[name].extremes, b[name].extremes))
        if caches[0] is not None and caches[1] is not None:
            assert all(map(np.array_equal, caches[0].keys, caches[1].keys))


def arrays(folder: Path) -> set[str]:
    """The stages with Hessians in the folder."""
    return {p.name.split("-")[1] for p in folder.glob("*-sum.*.array")}


def test_hessians_that_all_have_used_are_removed(alone, tmp_path):
    """Two parts, one after the other, and a third process that requests them again."""
    path, names, folder = text(tmp_path), matrices(SOURCE), tmp_path / "calibration"
    found, stages = {}, calibration_stages(SOURCE, path).names
    order = sorted(names, key=lambda n: next(i for i, s in enumerate(stages) if n in s))
    cut = len(order) // 2 + 1
    for own in (order[:cut], order[cut:]):
        calibration = SharedCalibration(folder)
        shared_hessians = Hessians(calibration.stages(SOURCE, path), own, others=names)
        found |= {name: shared_hessians.of(name)[0] for name in own}
        before = arrays(folder)
        calibration.finish()
        left = {str(i) for i, s in enumerate(stages) if set(s) & set(order[cut:])} if own == order[:cut] else set()
        assert arrays(folder) == left & before
    assert same(found, alone)
    assert same(hessians(SharedCalibration(folder).stages(SOURCE, path), names), alone)


def test_hessians_of_earlier_stages_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(shared, "_KEPT", 1)
    path, names, folder = text(tmp_path), matrices(MIXTURE), tmp_path / "calibration"
    stages = calibration_stages(MIXTURE, path).names
    last = max(i for i, s in enumerate(stages) if set(s) & set(names))
    hessians(SharedCalibration(folder).stages(MIXTURE, path), names)
    assert last >= 2 and arrays(folder) == {str(last - 1), str(last)}


def test_a_claim_of_an_ended_process_is_taken_over(alone, tmp_path, monkeypatch):
    monkeypatch.setattr(shared, "_LEASE", 0.5)
    path, names = text(tmp_path), matrices(SOURCE)
    program = f"""
import os, signal, sys
from polyquant.calibration import shared, stages
from polyquant.calibration.hessians import Hessians
advance, calls = stages.DecoderStages.advance, []
def killed(self, *args):
    calls.append(1)
    if len(calls) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return advance(self, *args)
stages.DecoderStages.advance = killed
names = {names!r}
calibration = shared.SharedCalibration(shared.Path({str(tmp_path / "calibration")!r}))
Hessians(calibration.stages({str(SOURCE)!r}, {str(path)!r}), names).of(names[0])
"""
    done = subprocess.run([sys.executable, "-c", program], env={**os.environ}, check=False)
    assert done.returncode == -9
    assert list((tmp_path / "calibration").glob("*.claim"))
    started = time.monotonic()
    assert same(hessians(SharedCalibration(tmp_path / "calibration").stages(SOURCE, path), names), alone)
    assert time.monotonic() - started > 0.3 and not list((tmp_path / "calibration").glob("*.claim"))


@pytest.mark.parametrize("damage", ["json", "array", "gone"])
def test_damaged_files_are_computed_again(alone, damage, tmp_path):
    path, names = text(tmp_path), matrices(SOURCE)
    hessians(SharedCalibration(tmp_path / "calibration").stages(SOURCE, path), names)
    for file in (tmp_path / "calibration").glob("*-sum*.json" if damage == "json" else "*-sum.*.array"):
        if damage == "gone":
            file.unlink()
        else:
            file.write_bytes(file.read_bytes()[:-40])
    assert same(hessians(SharedCalibration(tmp_path / "calibration").stages(SOURCE, path), names), alone)


def test_a_sum_is_that_of_its_shards(tmp_path):
    stages = calibration_stages(SOURCE, text(tmp_path))
    assert len(stages.shards) > 1
    name = next(n for n in stages.names[0] if "q_proj" in n)
    whole = stages.run(0, frozenset([name]), lambda _: None)[name]
    parts = [
        stages.advance(0, stages.first(s), frozenset([name]), lambda _: None, Moments, None)[1][name]
        for s in stages.shards
    ]
    total = parts[0]
    for part in parts[1:]:
        total.merge(part)
    assert total.count == whole.count == sum(len(w) for w in stages.windows) and SHARD > 1
    assert np.allclose(total.hessian, whole.hessian, rtol=1e-4)
