"""`polyquant importance`, and notes of a conversion about experts that no token reached."""

from __future__ import annotations

import json

import numpy as np
import pytest

from golden import VECTORS
from polyquant.calibration.importance import load_importance
from polyquant.ops import native

MOE = VECTORS / "architectures/qwen3_moe"


@pytest.fixture
def few(tmp_path):
    """Calibration text of one repeated word, which reaches few experts."""
    path = tmp_path / "few.json"
    path.write_text(json.dumps([[7] * 70]))
    return path


def test_the_file_is_written_and_unreached_experts_are_listed(polyquant, tmp_path, few):
    out = tmp_path / "imatrix.gguf"
    said = polyquant("importance", MOE, out, "--calibration", few)
    assert said.code == 0 and not said.err
    assert "experts of 9 stacks were reached by no token of the calibration text" in said.out
    assert "blk.0.ffn_gate_exps.weight: expert " in said.out and "25 tensors, 70 tokens" in said.out
    found = load_importance(out)
    assert found["blk.0.ffn_down_exps.weight"].shape == (8, 32)
    assert polyquant("inspect", out).code == 0
    planned = polyquant("quantize", MOE, tmp_path / "x.gguf", "--codec", "q4_0", "--importance", out, "--dry-run")
    assert "reached by no token" in " ".join(planned.out.split())
    again = polyquant("importance", MOE, out, "--calibration", few, "--overwrite", "--format", "json")
    told = json.loads(again.out)
    assert told["tokens"] == 70 and set(told["unreached"]) == {n for n, x in found.items() if x.ndim == 2}
    for name, experts in told["unreached"].items():
        np.testing.assert_array_equal(np.flatnonzero((found[name] == 1).all(1)), experts)


BAD = {
    "no text": ((MOE, "OUT"), "--calibration"),
    "too little text": ((MOE, "OUT", "--calibration", "SHORT"), "too little text to calibrate on"),
    "an encoder": ((VECTORS / "architectures/bert", "OUT", "--calibration", "FEW"), ""),
    "no model": ((VECTORS / "nothing", "OUT", "--calibration", "FEW"), "nothing"),
    "target exists": ((MOE, "FEW", "--calibration", "FEW"), "target exists"),
    "no windows": ((MOE, "OUT", "--calibration", "FEW", "--windows", "0"), "windows"),
    "a foreign token": ((MOE, "OUT", "--calibration", "FOREIGN"), "vocabulary"),
}


@pytest.mark.parametrize("case", BAD)
def test_models_that_cannot_be_measured_are_refused(case, polyquant, tmp_path, few):
    args, message = BAD[case]
    short, foreign = tmp_path / "short.json", tmp_path / "foreign.json"
    short.write_text("[[1, 2, 3]]")
    foreign.write_text(json.dumps([[99999] * 70]))
    places = {"OUT": tmp_path / "out.gguf", "FEW": few, "SHORT": short, "FOREIGN": foreign}
    outcome = polyquant("importance", *(places.get(a, a) for a in args))
    assert outcome.code == 2 and message in outcome.err and "Traceback" not in outcome.err
    assert not (tmp_path / "out.gguf").exists()


@pytest.mark.skipif(native.lib() is None, reason="the numpy encoder would take hours")
def test_similar_notes_are_merged(polyquant, tmp_path, few):
    asked = ("--to", "trellis-v3", "--bits", "2", "--effort", "fast", "--calibration", few)
    said = polyquant("quantize", MOE, tmp_path / "out", *asked, "--overwrite")
    assert said.code == 0
    lines = [line for line in said.out.splitlines() if "reached by no token" in line]
    assert len(lines) == 1 and lines[0].startswith("45 tensors not calibrated: reached by no token")
