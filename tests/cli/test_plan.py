"""polyquant plan: the plan, its parallel steps, estimates and simulations; nothing is written."""

from __future__ import annotations

import json

import pytest

from golden import VECTORS

SOURCE = VECTORS / "models/tiny-llama-tied/hf"


def test_a_plan_without_a_target(polyquant, tmp_path):
    shown = polyquant("plan", SOURCE, "--to", "trellis-v3", "--bits", "3", "--effort", "fast")
    assert shown.code == 0 and not shown.err
    assert shown.out.startswith("plan: trellis-v3, trellis.3.mul1.12")
    assert "whole, the largest" in shown.out and "barrier: merge" in shown.out
    assert not list(tmp_path.iterdir())


def test_the_estimate_and_a_simulation_as_json(polyquant, tmp_path):
    command = ("plan", SOURCE, tmp_path / "out.gguf", "--recipe", "q4_k_m", "--format", "json")
    shown = polyquant(*command, "--simulate", "8,4,1.25,1000", "--price", "2", "--spread", "0")
    found = json.loads(shown.out)
    assert found["recipe"] == "q4_k_m" and found["start"] > 0
    assert [row["workers"] for row in found["estimate"]] == [1, 2, 4, 8, 64]
    assert found["parallel"]["divided"] == len(found["steps"]) and found["parallel"]["whole"] == 0
    simulation = found["simulation"]
    assert simulation["cost"] == pytest.approx(2 * simulation["machine_hours"])
    assert simulation["machine_hours"] == pytest.approx(8 * simulation["seconds"] / 3600)
    assert "simulation" not in json.loads(polyquant(*command).out)
    assert not list(tmp_path.iterdir())


def test_a_simulation_of_an_engine(polyquant):
    shown = polyquant(
        "plan", SOURCE, "--to", "gguf", "--codec", "q8_0", "--engine", "ray", "--simulate", "2,2,0,0.5", "--part", "1/2"
    )
    assert shown.code == 0
    assert "part 1 of 2: " in shown.out and "simulation: 2 machines with 2 cores, units of a queue" in shown.out


def test_calibration_and_bits_are_barriers(polyquant, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("In the beginning was the word. " * 40)
    shown = polyquant("plan", SOURCE, "--bits", "3", "--effort", "fast", "--calibration", text)
    assert "in order: " in shown.out and "barrier: calibration: layer by layer" in shown.out
    shown = polyquant("plan", SOURCE, "--target-bpw", "3.5", "--effort", "fast")
    assert "barrier: bits: allocated in the plan" in shown.out


@pytest.mark.parametrize("text", ["64", "0,1,1,1", "1,2,3,x"])
def test_machines_that_are_not_understood(text, polyquant):
    shown = polyquant("plan", SOURCE, "--codec", "q8_0", "--simulate", text)
    assert shown.code == 2 and "--simulate needs NODES,CORES,GBPS,MTBF" in shown.err and shown.err.count("\n") == 1
