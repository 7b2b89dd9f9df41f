"""Trellis folders on the command line: what validate, inspect, explain and compare print, and their exit codes."""

import json

import pytest

from formats.test_trellis_check import BAD
from formats.trellis_folders import TRELLIS, copy


@pytest.mark.parametrize("name", ["component missing", "weight_map leaves", "truncated", "cyclic link", "bits of 9"])
def test_bad_folder(name, polyquant, tmp_path):
    source, change, code, message = BAD[name]
    folder = copy(source, tmp_path)
    change(folder)
    checked = polyquant("validate", folder)
    assert (checked.code, checked.err) == (1, "")
    assert f"{code} error" in checked.out
    looked = polyquant("inspect", folder)
    assert (looked.code, looked.out) == (2, "")
    assert message in looked.line


def test_sound_folder(polyquant):
    checked = polyquant("validate", TRELLIS / "v3_seed_kn")
    assert (checked.code, checked.err) == (0, "")
    assert "sound" in checked.out


def test_dialect_is_named(polyquant):
    checked = polyquant("validate", TRELLIS / "v2_exl3", "--format", "json")
    assert checked.code == 1
    assert {"TRL046", "TRL047", "TRL048"} <= {f["code"] for f in json.loads(checked.out)}
    assert "Hadamard" in polyquant("explain", "trl047").out


def test_inspect_shows_the_codecs(polyquant):
    shown = polyquant("inspect", TRELLIS / "v2_exl3")
    assert shown.code == 0
    assert "trellis-v2" in shown.out and "metal_marlin.4" in shown.out
    exl3 = polyquant("inspect", TRELLIS / "exl3_tensors.safetensors", "--tensors", "*")
    assert "exl3.3.mul1" in exl3.out


def test_compare_can_repair(polyquant):
    folder = TRELLIS / "v2_exl3"
    plain = json.loads(polyquant("compare", folder, folder, "--format", "json").out)
    mended = json.loads(polyquant("compare", folder, folder, "--repair", "--format", "json").out)
    assert plain["rrmse"] == 0 < mended["rrmse"]
    refused = polyquant("compare", folder, TRELLIS / "exl3_tensors.safetensors", "--axes", "kn")
    assert refused.code == 2 and "Trellis folders only" in refused.line
