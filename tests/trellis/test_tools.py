"""The two commands of the document: exit codes, and one-line errors."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import polyquant as pq
from polyquant.analysis.demo import demo_model
from polyquant.tools import migrate_v2_to_v3, validate_trellis_v3

VECTORS = Path(__file__).parents[1] / "vectors" / "trellis"
PATHS = os.pathsep.join(str(Path(p).resolve()) for p in sys.path)


def run(module, *arguments):
    return subprocess.run(
        [sys.executable, "-m", f"polyquant.tools.{module}", *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": PATHS}, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_the_documents_two_commands(tmp_path):
    done = run("migrate_v2_to_v3", "--input", VECTORS / "v2_cuda", "--output", tmp_path / "v3", "--shard-size", "2GB")
    assert done.returncode == 0 and "21 tensors" in done.stdout, done.stderr
    assert (tmp_path / "v3" / "model-00001-of-00001.safetensors").exists()
    done = run("validate_trellis_v3", tmp_path / "v3")
    assert done.returncode == 0 and "sound" in done.stdout and not done.stderr
    old, new = pq.open(VECTORS / "v2_cuda"), pq.open(tmp_path / "v3")
    assert set(old) == set(new)
    for name, weight in new.items():
        assert np.array_equal(weight.dequantize(), old[name].dequantize())


def test_findings_are_exit_code_1(tmp_path, capsys):
    folder = tmp_path / "v3"
    assert migrate_v2_to_v3.main(["--input", str(VECTORS / "v2_cuda"), "--output", str(folder)]) == 0
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    del index["weight_map"]["model.norm.weight"]
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert validate_trellis_v3.main([str(folder)]) == 1
    shown = capsys.readouterr().out
    assert "model.norm.weight" in shown and "polyquant explain TRL" in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--input", "{nothing}", "--output", "{out}"], "cannot be opened"),
        (["--input", "{float}", "--output", "{out}"], "no trellis weights in this folder"),
        (["--input", "{v2}", "--output", "{v2}"], "v2"),
        (["--input", "{v2}", "--output", "{out}", "--shard-size", "huge"], "not a shard size"),
    ],
)
def test_migration_errors_are_one_line(tmp_path, capsys, arguments, words):
    shutil.copytree(VECTORS / "v2_odd", tmp_path / "v2")
    names = {
        "nothing": tmp_path / "nothing",
        "float": demo_model("llama"),
        "v2": tmp_path / "v2",
        "out": tmp_path / "out",
    }
    assert migrate_v2_to_v3.main([a.format(**names) for a in arguments]) == 2
    said = capsys.readouterr()
    assert words in said.err and said.err.count("\n") == 1 and not said.out
    assert not (tmp_path / "out").exists()


def test_validation_refuses_other_formats(capsys, tmp_path):
    assert validate_trellis_v3.main([str(demo_model("llama"))]) == 2
    assert validate_trellis_v3.main([str(tmp_path / "nothing")]) == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 2 and "not a Trellis folder" in said.err and not said.out


def test_repair_and_axes_are_passed_to_the_reader(tmp_path, capsys):
    source = str(VECTORS / "v2_exl3")
    assert migrate_v2_to_v3.main(["--input", source, "--output", str(tmp_path / "fixed"), "--repair"]) == 0
    fixed = pq.open(tmp_path / "fixed")
    with np.load(VECTORS / "intended_v2_exl3_f16.npz") as want:
        for name in want.files:
            np.testing.assert_allclose(fixed[name].dequantize(), want[name].astype(np.float32), rtol=2e-3, atol=1e-4)
    capsys.readouterr()
    assert migrate_v2_to_v3.main(["--input", source, "--output", str(tmp_path / "kn"), "--axes", "kn"]) == 0
    assert "axes kn, as requested" in capsys.readouterr().err
