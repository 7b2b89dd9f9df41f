"""`quantize` and `convert` to msModelSlim folders on the command line: plans, and one-line errors."""

from __future__ import annotations

import json

import pytest

from formats.msmodelslim_folders import MSMODELSLIM

MODEL = MSMODELSLIM / "models/qwen3_bf16"
IDS = MODEL / "calib_ids.json"
SLIM = ("--to", "msmodelslim")


def test_default_codec_is_w8a16(polyquant, tmp_path):
    dry = polyquant("quantize", MODEL, tmp_path / "out", *SLIM, "--dry-run", "--format", "json")
    plan = json.loads(dry.out)
    assert {s["to"] for s in plan["steps"]} == {"bf16", "w8a16"} and not (tmp_path / "out").exists()
    made = polyquant("quantize", MODEL, tmp_path / "out", *SLIM)
    assert made.code == 0 and "quantize bf16 > w8a16" in made.out
    files = {f.name: f.stat().st_size for f in (tmp_path / "out").iterdir()}
    assert files == plan["files"] and "vocab.json" in files
    assert polyquant("validate", tmp_path / "out").code == 0


@pytest.mark.parametrize(
    "words, kinds",
    [
        (("--codec", "w8a16.g32"), {"W8A16"}),
        (("--codec", "w8a8", "--calibration", IDS), {"W8A8"}),
        (("--codec", "w8a8s", "--calibration", IDS, "--dialect", "v0"), {"W8A8S"}),
        (("--codec", "w8a8.dynamic", "--dialect", "ascendv1"), {"W8A8_DYNAMIC"}),
        (("--codec", "w8a8", "--calibration", IDS, "--smooth", "m4", "--kv", "c8"), {"W8A8", "C8"}),
        (("--codec", "w8a8", "--calibration", IDS, "--smooth", "shift", "--keep", "*.1.mlp.down_proj"), {"W8A8"}),
        (("--codec", "w8a16.g32", "--calibration", IDS, "--effort", "max"), {"W8A16"}),
        (("--codec", "w8a16", "--exact-tool", "--rule", "*down_proj*=w8a8.dynamic"), {"W8A16", "W8A8_DYNAMIC"}),
    ],
)
def test_each_option_makes_a_sound_folder(polyquant, tmp_path, words, kinds):
    made = polyquant("quantize", MODEL, tmp_path / "out", *words)
    assert made.code == 0, made
    (file,) = (tmp_path / "out").glob("quant_model_description*.json")
    said = json.loads(file.read_text())
    assert {w for n, w in said.items() if n.startswith("model.")} - {"FLOAT"} == kinds
    assert polyquant("validate", tmp_path / "out").code == 0


def test_sensitive_layers_are_selected_and_listed(polyquant, tmp_path):
    words = ("--codec", "w8a8", "--calibration", IDS, "--keep", "auto", "--keep-error", "0.005")
    made = polyquant("quantize", MODEL, tmp_path / "out", *words)
    assert made.code == 0 and "--keep auto: 1 layers float" in made.out, made
    layer = next(x for x in made.out.splitlines() if x.startswith("kept as floats: ")).removeprefix("kept as floats: ")
    said = json.loads((tmp_path / "out/quant_model_description.json").read_text())
    assert said[f"{layer}.weight"] == "FLOAT" and f"{layer}.weight_scale" not in said


def test_keep_auto_works_for_weight_only_codecs(polyquant, tmp_path):
    words = ("--codec", "w4a16", "--calibration", IDS, "--keep", "auto", "--keep-error", "0.1", "--dry-run")
    assert "--keep auto: 0 layers float" in polyquant("quantize", MODEL, tmp_path / "out", *words).out


def test_converting_between_dialects_needs_no_other_option(polyquant, tmp_path):
    polyquant("quantize", MODEL, tmp_path / "new", "--codec", "w8a16")
    made = polyquant("convert", tmp_path / "new", tmp_path / "old", "--dialect", "v0")
    assert made.code == 0 and "transcode w8a16 > w8a16.bf16" in made.out, made
    assert (tmp_path / "old/quant_model_description_w8a16.json").exists()
    again = polyquant("convert", tmp_path / "new", tmp_path / "same")
    assert again.code == 0 and (tmp_path / "same/quant_model_weights.safetensors").exists()
    folders = [tmp_path / "new/quant_model_weights.safetensors", tmp_path / "same/quant_model_weights.safetensors"]
    assert folders[0].read_bytes() == folders[1].read_bytes()


@pytest.mark.parametrize(
    "words, what",
    [
        (("--codec", "w8a8"), "--calibration FILE"),
        (("--codec", "w8a8s"), "--ranges FILE"),
        (("--codec", "w8a16", "--smooth", "m1"), "--calibration FILE"),
        (("--codec", "w8a16", "--kv", "c8"), "--calibration FILE"),
        (("--codec", "w8a16", "--effort", "max"), "--calibration FILE"),
        (("--codec", "w8a16", "--keep", "auto"), "--calibration FILE"),
        (("--codec", "w8a16", "--keep-error", "0.1"), "--keep auto"),
        (("--codec", "w4a16", "--keep", "auto", "--keep-error", "1e-9", "--calibration", IDS), "--keep-error"),
        (("--codec", "w8a16", "--calibration", IDS), "omit --calibration"),
        (("--codec", "w8a16", "--ranges", "RANGES"), "omit --ranges"),
        (("--codec", "w8a8", "--ranges", "RANGES"), "has no entry for 14 layers"),
        (("--codec", "w8a8", "--ranges", "RANGES", "--calibration", IDS), "mutually exclusive"),
        (("--codec", "w8a8", "--ranges", "nowhere.json"), "nowhere.json"),
        (("--codec", "w8a8", "--calibration", "nowhere.txt"), "nowhere.txt"),
        (("--codec", "w8a8", "--calibration", IDS, "--exact-tool", "--effort", "max"), "mutually exclusive"),
        (("--codec", "w8a16", "--keep", "nothing"), "matches no linear layer"),
        (("--codec", "w8a16.g7"), "do not divide"),
        (("--codec", "w8a16.g128"), "do not divide"),
        (("--codec", "w8a17"), "no codec is named"),
        (("--codec", "w4a8.dynamic", "--dialect", "v0"), "--dialect ascendv1"),
        ((*SLIM, "--codec", "q4_k"), "cannot store q4_k"),
        ((*SLIM, "--codec", "bf16"), "no weight would be quantized"),
        ((*SLIM, "--recipe", "q4_k_m"), "cannot store"),
        ((*SLIM, "--codec", "w8a16", "--effort", "fast"), "unknown effort"),
        ((*SLIM, "--codec", "w8a16", "--bits", 4), "--bits"),
        (("--to", "gguf", "--kv", "c8"), "--to msmodelslim"),
        (("--to", "hf", "--codec", "w8a16"), "--to msmodelslim"),
        (("--to", "trellis-v3", "--keep", "*"), "--to msmodelslim"),
    ],
)
def test_errors_are_one_line(polyquant, tmp_path, words, what):
    (tmp_path / "ranges.json").write_text('{"a": [0, 1]}')
    words = [tmp_path / "ranges.json" if w == "RANGES" else w for w in words]
    refused = polyquant("quantize", MODEL, tmp_path / "out", *words)
    assert refused.code == 2 and what in refused.err, refused
    assert len(refused.err.splitlines()) == 1 and not list(tmp_path.glob("*out*"))
