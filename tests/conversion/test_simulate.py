"""The model of machines: known times, work that is neither lost nor invented, and the same result for the same seed."""

from __future__ import annotations

import pytest

import polyquant as pq
from golden import VECTORS
from polyquant.conversion.costs import step_costs
from polyquant.conversion.estimate import Workload
from polyquant.conversion.simulate import Load, Machines, Simulation, parse_machines, simulate
from polyquant.conversion.speed import REFERENCE, Speed, measure_speed
from polyquant.errors import PlanError

SOURCE = VECTORS / "models/tiny-llama-tied/hf"
UNITS = [Load(100.0, 10**9, 10)] * 64


@pytest.mark.parametrize("scheme", ["parts", "units"])
@pytest.mark.parametrize(
    ("machines", "seconds"),
    [
        (Machines(1, 1), 1 + 6400),
        (Machines(4, 1), 1 + 1600),
        (Machines(1, 4), 1 + 1600),
        (Machines(1, 2, processes=4, threads=1), 2 + 3200),  # four processes share two cores, at start-up too
        (Machines(1, 8, processes=4, threads=1), 1 + 1600),
        (Machines(4, 1, gbps=0.005), 1 + 16 * 200),  # the link of a machine is slower than its core
        (Machines(4, 1, gbps=1, storage=0.01), 1 + 16 * 400),  # and the storage slower than four links
        (Machines(4, 1, gbps=0.02), 1 + 1600),  # transfers overlap with arithmetic
    ],
)
def test_times_without_failures(machines, scheme, seconds):
    found = simulate(UNITS, machines, scheme=scheme, start=1.0)
    assert found.seconds == pytest.approx(seconds, rel=1e-6)
    assert found.traffic == 64 * 10**9 and found.lost == 0 and found.failures == 0
    assert found.machine_hours == pytest.approx(machines.nodes * seconds / 3600, rel=1e-6)


def test_efficiency_cost_and_merge():
    found = simulate(UNITS, Machines(64, 1, price=2.0), scheme="parts", start=1.0, end=10.0)
    assert found.seconds == pytest.approx(111)
    assert found.efficiency == pytest.approx((6401 + 10) / (64 * 111))
    assert found.cost == pytest.approx(2 * 64 * 111 / 3600)


@pytest.mark.parametrize("scheme", ["parts", "units"])
def test_failures_cost_time_and_repeat_units(scheme):
    machines = Machines(8, 1, mtbf=1.0, restart=60.0)
    calm = simulate(UNITS, Machines(8, 1), scheme=scheme)
    results = [simulate(UNITS, Machines(8, 1, mtbf=0.5, restart=60.0, seed=seed), scheme=scheme) for seed in range(20)]
    assert all(r.seconds >= calm.seconds - 1e-6 for r in results)
    assert sum(r.failures for r in results) > 40 and sum(r.repeated for r in results) > 40
    assert all(0 <= r.lost < 0.3 for r in results) and any(r.lost > 0.001 for r in results)
    assert simulate(UNITS, machines, scheme=scheme) == simulate(UNITS, machines, scheme=scheme)


def test_a_part_resumes_after_its_last_tensor():
    whole = Machines(1, 1, mtbf=0.1, restart=0.0, seed=3)
    one_tensor, many = (simulate([Load(600.0, 0, n)], whole, scheme="parts") for n in (1, 600))
    assert many.failures > 0 and many.lost < 0.02 < one_tensor.lost
    assert 600 <= many.seconds < 610 < one_tensor.seconds


def test_silent_failures_are_found_by_other_workers_or_the_lease():
    """A silent machine holds its unit until another one repeats it."""
    many = [simulate(UNITS, Machines(4, 1, mtbf=0.5, silent=1.0, seed=seed)) for seed in range(20)]
    loud = [simulate(UNITS, Machines(4, 1, mtbf=0.5, silent=0.0, seed=seed)) for seed in range(20)]
    assert sum(r.repeated for r in many) > 20
    assert sum(r.seconds for r in many) > sum(r.seconds for r in loud)
    assert max(r.seconds for r in many) < 10 * 1600


def test_slow_machines_are_helped_by_a_queue():
    machines = Machines(16, 1, spread=0.3, seed=1)
    assert simulate(UNITS, machines).seconds < 0.8 * simulate(UNITS, machines, scheme="parts").seconds


def test_a_job_that_cannot_finish_is_an_error():
    with pytest.raises(PlanError, match="fail more often"):
        simulate([Load(36_000.0)], Machines(1, 1, mtbf=0.1))


@pytest.mark.parametrize(
    "text", ["", "1,2,3", "0,1,1,1", "1,0,1,1", "1,1,-1,1", "1,1,nan,1", "1,1,1,inf", "a,1,1,1", "1,1,1,1,1"]
)
def test_machines_that_cannot_be_parsed(text):
    with pytest.raises(PlanError, match="NODES,CORES,GBPS,MTBF"):
        parse_machines(text)


def test_parsed_machines():
    assert parse_machines("64,32,1.25,2000") == Machines(64, 32, 1.25, 2000.0)


@pytest.mark.parametrize(
    ("to", "options"),
    [
        ("gguf", {"recipe": "q4_k_m"}),
        ("trellis-v3", {"bits": 3, "effort": "fast"}),
        ("msmodelslim", {"codec": "w8a16"}),
    ],
)
def test_loads_are_the_plan(to, options):
    plan = pq.plan(SOURCE, to, **options)
    work = Workload(plan, REFERENCE)
    total = sum(c.total for c in step_costs(plan.steps)) / 1e12
    for count in (1, 3, 16):
        loads = work.loads(count)
        assert sum(x.seconds for x in loads) == pytest.approx(total)
        assert sum(x.nbytes for x in loads) == pytest.approx(
            sum(s.nbytes for s in plan.steps) + sum(work.read), rel=0.01
        )
    found = work.parallelism()
    assert found.divided + found.whole == len(plan.steps) and found.calibrated == 0
    estimate = work.estimate(0.5)
    assert estimate[1] == pytest.approx(0.6 + total)
    assert isinstance(work.simulate(Machines(2, 2), 0.5, engine=True), Simulation)


def test_a_calibrated_plan_goes_layer_by_layer(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("In the beginning was the word. " * 40)
    plan = pq.plan(SOURCE, "trellis-v3", bits=3, effort="fast", calibration=str(text))
    work = Workload(plan, REFERENCE)
    assert work.parallelism().calibrated == sum(s.searches for s in plan.steps) > 0
    assert any("layer by layer" in barrier for barrier in work.parallelism().barriers)
    plain = Workload(pq.plan(SOURCE, "trellis-v3", bits=3, effort="fast"), REFERENCE)
    assert sum(work.seconds) > sum(plain.seconds)  # feedback products
    extra = [sum(x.seconds for x in work.loads(n)) - sum(work.seconds) for n in (1, 2)]
    assert extra[0] > 0 and extra[1] == pytest.approx(extra[0])  # the processes share the calibration


def test_this_machine_is_measured():
    plan = pq.plan(SOURCE, "gguf", codec="q8_0")
    speed = measure_speed(plan.steps)
    assert 0.01 < speed.traffic < 100 and set(speed.codes) == {("f16", "q8_0")}
    assert all(0.01 < factor < 100 for factor in speed.codes.values())
    slow = Speed(2 * speed.traffic, {k: 2 * v for k, v in speed.codes.items()}, 2 * speed.others)
    assert sum(Workload(plan, slow).seconds) == pytest.approx(2 * sum(Workload(plan, speed).seconds))
