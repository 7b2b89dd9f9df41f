"""SARIF output: the structure that the standard and code hosts require."""

from __future__ import annotations

import json
import re
import shutil
import urllib.parse
from pathlib import Path

import pytest

import polyquant as pq
from golden import VECTORS
from polyquant.analysis.sarif import failed, report
from polyquant.errors import InputError
from polyquant.findings import Finding, Findings, Severity

HF = VECTORS / "models/tiny-llama-tied/hf"
FINDINGS = Findings(
    [
        Finding("GGUF012", Severity.ERROR, "a message", "blk.0.attn_q.weight", "model 1.gguf"),
        Finding("SUM005", Severity.WARNING, "x\x1b[2J\n", None, "../../etc/passwd"),
        Finding("GGUF012", Severity.NOTE, "another", "a\x00b", None),
    ]
)


def checked(log):
    """The results of a log that has what SARIF 2.1.0 requires."""
    json.loads(json.dumps(log, allow_nan=False))
    assert log["version"] == "2.1.0"
    (run,) = log["runs"]
    driver = run["tool"]["driver"]
    assert (driver["name"], driver["version"]) == ("polyquant", pq.__version__)
    ids = [rule["id"] for rule in driver["rules"]]
    assert len(ids) == len(set(ids))
    for rule in driver["rules"]:
        assert rule["fullDescription"]["text"] == pq.explain(rule["id"])
        assert rule["help"]["text"] and rule["shortDescription"]["text"].endswith(".")
    for result in run["results"]:
        assert ids[result["ruleIndex"]] == result["ruleId"]
        assert result["level"] in ("error", "warning", "note")
        assert result["message"]["text"].isprintable()
        (location,) = result["locations"]
        uri = location["physicalLocation"]["artifactLocation"]["uri"]
        assert urllib.parse.urlsplit(uri).scheme == "" and not uri.startswith("/") and ".." not in uri.split("/")
        assert re.fullmatch(r"[A-Za-z0-9._~%/-]+", uri)
        assert location["physicalLocation"]["region"]["startLine"] == 1
        assert len(result["partialFingerprints"]["polyquant/v1"]) == 64
    assert run["invocations"][0]["executionSuccessful"] is True
    return run["results"]


def test_levels_rules_and_places(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("models").mkdir()
    one, two, three = checked(report(FINDINGS, "models"))
    assert [r["level"] for r in (one, two, three)] == ["error", "warning", "note"]
    assert [r["ruleIndex"] for r in (one, two, three)] == [0, 1, 0]
    assert one["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "models/model%201.gguf"
    assert one["locations"][0]["logicalLocations"][0]["fullyQualifiedName"] == "blk.0.attn_q.weight"
    assert one["message"]["text"] == "blk.0.attn_q.weight: a message"
    assert three["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "models"
    assert len({r["partialFingerprints"]["polyquant/v1"] for r in (one, two, three)}) == 3


def test_no_path_of_the_machine(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert str(tmp_path.parent) not in json.dumps(report(FINDINGS, tmp_path / "model"))
    assert str(tmp_path) not in json.dumps(failed(InputError("is broken", file=tmp_path)))


@pytest.mark.parametrize("whole", [False, True])
def test_findings_of_a_model(tmp_path, monkeypatch, whole):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(HF, "model")
    if not whole:
        with Path("model/model.safetensors").open("r+b") as f:
            f.seek(-2, 2)
            f.write(b"\xff\x7f")  # NaN
    results = checked(report(pq.validate("model"), "model"))
    assert ("TEN001" in {r["ruleId"] for r in results}) is not whole
    for result in results:
        assert Path(result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]).exists()


def test_the_command_prints_it(polyquant, tmp_path):
    done = polyquant("validate", HF, "--format", "sarif")
    checked(json.loads(done.out))
    (tmp_path / "m.gguf").write_bytes(b"nothing")
    bad = polyquant("validate", tmp_path / "m.gguf", "--format", "sarif")
    (run,) = json.loads(bad.out)["runs"]
    assert bad.code == 2 and bad.line
    assert run["invocations"][0]["executionSuccessful"] is False
    assert run["invocations"][0]["toolExecutionNotifications"][0]["level"] == "error"
