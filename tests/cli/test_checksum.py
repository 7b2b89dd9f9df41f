"""`polyquant checksum`, and the lines of `validate` about checksums."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest

from golden import VECTORS

HF = VECTORS / "models/tiny-llama-tied/hf"


@pytest.fixture
def model(tmp_path):
    return shutil.copytree(HF, tmp_path / "model")


def test_written_checked_and_found(polyquant, model):
    done = polyquant("checksum", model)
    assert done.code == 0, done.err
    assert "polyquant-checksums.json" in done.out
    assert polyquant("validate", model).out.endswith(", checksums agree\n")
    with (model / "model.safetensors").open("r+b") as f:
        f.seek(-1, 2)
        f.write(b"\x55")
    found = polyquant("validate", model)
    assert found.code == 1
    assert "SUM001 error model.safetensors: model." in found.out


def test_existing_checksums_are_replaced_on_request_only(polyquant, model):
    assert polyquant("checksum", model).code == 0
    again = polyquant("checksum", model)
    assert again.code == 2
    assert "target exists" in again.line
    assert polyquant("checksum", model, "--overwrite").code == 0
    foreign = polyquant("checksum", model, "--overwrite", "-o", model / "config.json")
    assert "not a file of checksums" in foreign.line
    assert (model / "config.json").read_bytes() == (HF / "config.json").read_bytes()


def test_json_is_printed_and_not_written(polyquant, model):
    done = polyquant("checksum", model, "--format", "json")
    assert json.loads(done.out)["checksums"] == 1
    assert not (model / "polyquant-checksums.json").exists()


def test_lists_are_those_of_sha256sum(polyquant, model, tmp_path):
    done = polyquant("checksum", model, "--sha256")
    names = sorted(p.name for p in HF.iterdir())
    theirs = subprocess.run(["sha256sum", *names], cwd=HF, capture_output=True, text=True, check=True)
    assert set(done.out.splitlines()) == set(theirs.stdout.splitlines())
    assert polyquant("checksum", model, "--sha256", "-o", tmp_path / "SHA256SUMS").code == 0
    assert (tmp_path / "SHA256SUMS").read_text() == done.out
    assert polyquant("checksum", model, "--sha256", "--overwrite", "-o", tmp_path / "SHA256SUMS").code == 2
    assert polyquant("validate", model, "--checksums", tmp_path / "SHA256SUMS").code == 0
    (model / "config.json").write_bytes((HF / "config.json").read_bytes() + b"\n")
    changed = polyquant("validate", model, "--checksums", tmp_path / "SHA256SUMS")
    assert "SUM004 error config.json" in changed.out


def test_models_are_compared_in_any_container(polyquant, model, tmp_path):
    polyquant("convert", model, tmp_path / "copy", "--shard-size", "300000")
    polyquant("convert", model, tmp_path / "m.gguf")
    polyquant("convert", tmp_path / "m.gguf", tmp_path / "split.gguf", "--shard-size", "300000")
    same = polyquant("checksum", tmp_path / "copy", "--against", model)
    assert same.code == 0, same.out
    assert "equal" in same.out
    split = min(tmp_path.glob("split-*"))
    assert polyquant("checksum", split, "--against", tmp_path / "m.gguf").code == 0
    sums = tmp_path / "sums.json"
    assert polyquant("checksum", tmp_path / "m.gguf", "-o", sums).code == 0
    assert polyquant("checksum", split, "--against", sums).code == 0
    other = polyquant("checksum", tmp_path / "m.gguf", "--against", model)
    assert other.code == 1
    assert "under other names" in other.out
    told = json.loads(polyquant("checksum", tmp_path / "m.gguf", "--against", model, "--format", "json").out)
    assert not told["equal"]
    assert told["renamed"] == told["equal_tensors"] > 0


@pytest.mark.parametrize("args", [("--sha256", "--against", "x"), ("--threads", "0"), ("--tile", "x")])
def test_bad_options_are_refused(polyquant, model, args):
    assert polyquant("checksum", model, *args).code == 2


def test_options_of_another_format_are_refused(polyquant, model):
    assert "applies to" in polyquant("checksum", model, "--ternary-layout", "i2_s.arm").line


@pytest.mark.parametrize("content", [b"{", b'{"checksums": 1}', b"x" * 100, b"\0" * 200])
def test_given_checksums_that_cannot_be_read_are_one_line(polyquant, model, tmp_path, content):
    (tmp_path / "sums").write_bytes(content)
    done = polyquant("validate", model, "--checksums", tmp_path / "sums")
    assert done.code == 2
    assert "sums" in done.line
