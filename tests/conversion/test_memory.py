"""The memory estimate of a plan, and `max_memory`."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

import polyquant as pq
from golden import VECTORS
from polyquant.conversion.memory import job_bytes, program_bytes, working_bytes, working_limit
from polyquant.errors import PlanError
from polyquant.formats.sizes import memory_bytes

FOLDER = VECTORS / "models/tiny-llama-untied/hf"
CHILD = """
import sys
import polyquant as pq
plan = pq.plan(sys.argv[1], "gguf", codec=sys.argv[2])
estimate = plan.peak_memory
pq.convert(plan, sys.argv[3], threads=int(sys.argv[4]), max_memory=sys.argv[5] if len(sys.argv) > 5 else None)
peak = next(1024 * int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(estimate, peak)
"""


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A GGUF file of 64 MiB in f32: one matrix of 2,048 x 8,192."""
    path = tmp_path_factory.mktemp("wide") / "wide.gguf"
    rng = np.random.default_rng(0)
    w = rng.integers(-1, 2, (2048, 8192), dtype=np.int8).astype(np.float32)
    pq.save({"blk.0.ffn_up.weight": w, "blk.1.ffn_up.weight": w}, path)
    return path


def measured(*arguments: object) -> tuple[int, int]:
    """Return the estimate of the plan and the peak of the process, in bytes."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, *map(str, arguments)], capture_output=True, text=True, check=True, timeout=120
    )
    estimate, peak = map(int, done.stdout.split())
    return estimate, peak


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("codec", ["q8_0", "i2_s.x86"])
def test_the_estimate_is_an_upper_bound(wide, codec, tmp_path):
    estimate, peak = measured(wide, codec, tmp_path / "out.gguf", 2)
    assert peak <= estimate < 3 * peak


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_eight_threads_stay_within_the_limit(wide, tmp_path):
    """I2_S holds whole tensors: 48 MiB each, so that only one fits."""
    estimate, _ = measured(wide, "i2_s.x86", tmp_path / "free.gguf", 2)
    limit = estimate - (40 << 20)  # the estimate is for two
    _, peak = measured(wide, "i2_s.x86", tmp_path / "limited.gguf", 8, limit)
    assert peak <= limit
    assert (tmp_path / "limited.gguf").read_bytes() == (tmp_path / "free.gguf").read_bytes()


def test_a_limit_below_the_program_is_refused(tmp_path):
    with pytest.raises(PlanError, match=r"memory limit is too small \(expected at least .*--max-memory \d+MB"):
        pq.convert(FOLDER, tmp_path / "a.gguf", codec="q8_0", max_memory="10MB")
    assert not list(tmp_path.iterdir())


def test_a_tensor_that_cannot_be_cut_is_named(wide, tmp_path):
    plan = pq.plan(wide, "gguf", codec="i2_s.x86")
    need = job_bytes(plan.steps[0], calibrated=False)
    assert need == 3 * 2048 * 8192
    with pytest.raises(PlanError, match=r"blk\.\d\.ffn_up\.weight: .*cannot be converted in parts.*another codec"):
        working_limit(plan.steps, calibrated=False, max_memory=program_bytes() + need // 2)
    assert working_limit(plan.steps, calibrated=False, max_memory=2 * program_bytes() + need) >= need


def test_the_working_memory_grows_with_threads():
    steps = pq.plan(FOLDER, "gguf", codec="q8_0").steps
    one, four = (working_bytes(steps, calibrated=False, threads=n) for n in (1, 4))
    assert four == 4 * one


@pytest.mark.parametrize(("text", "value"), [("2GB", 2 * 10**9), ("1.5MiB", 3 << 19), ("4096", 4096), ("1TB", 10**12)])
def test_sizes(text, value):
    assert memory_bytes(text) == value


@pytest.mark.parametrize("text", ["", "0", "-1", "2 GBs", "one", "1e9", "9" * 5000])
def test_other_sizes_are_refused(text):
    with pytest.raises(PlanError, match="not a memory size"):
        memory_bytes(text)
