"""`convert` and `quantize` to Trellis folders on the command line: plans, and one-line errors."""

from __future__ import annotations

import json

import pytest

from golden import VECTORS

LLAMA = VECTORS / "models/tiny-llama-untied/hf"
QUANTIZED = VECTORS / "models/tiny-llama-untied/tiny-llama-untied-Q4_0.gguf"


def test_the_plan_shows_bits_and_exact_bytes(polyquant, tmp_path):
    command = ("quantize", LLAMA, tmp_path / "out", "--bits", 3, "--effort", "fast", "--shard-size", "300KB")
    dry = polyquant(*command, "--dry-run", "--rule", "*down*=trellis.5")
    assert dry.code == 0 and not (tmp_path / "out").exists()
    assert "trellis_viterbi: quantized weights at" in dry.out and "rule *down*" in dry.out
    plan = json.loads(polyquant(*command, "--dry-run", "--format", "json").out)
    made = polyquant(*command, "--format", "json")
    assert made.code == 0, made
    files = {f.name: f.stat().st_size for f in (tmp_path / "out").iterdir()}
    assert files == plan["files"] and sum(files.values()) == plan["bytes"]
    shards = {n: size for n, size in files.items() if n.endswith(".safetensors")}
    assert len(shards) > 2 and max(shards.values()) <= 300_000
    assert plan["method"] == "trellis_viterbi" and 3.3 < plan["quantized_bpw"] < 3.5
    said = json.loads((tmp_path / "out/quantization_config.json").read_text())
    assert said["global_config"]["average_bits_per_weight"] == pytest.approx(plan["quantized_bpw"], abs=1e-6)
    assert polyquant("validate", tmp_path / "out").code == 0


def test_quantize_defaults_to_four_bits(polyquant, tmp_path):
    plan = json.loads(
        polyquant("quantize", LLAMA, tmp_path / "x", "--to", "trellis-v3", "--dry-run", "--format", "json").out
    )
    assert {s["to"] for s in plan["steps"]} == {"bf16", "trellis.4"}


@pytest.mark.parametrize(
    "words, what",
    [
        (["--to", "trellis-v3"], "--bits 4"),
        (["--to", "trellis-v3", "--effort", "max"], "--bits 3"),
        (["--to", "hf", "--bits", 3], "--to trellis-v3"),
        (["--to", "hf", "--codec", "trellis.3"], "--to trellis-v3"),
        (["--bits", 3, "--codec", "trellis.4"], "omit --bits"),
        (["--bits", 3, "--rule", "*q_proj*=trellis.9"], "did you mean trellis"),
        (["--bits", 3, "--rule", "lm_head*=q6_k"], "--rule"),
        (["--bits", 3, "--shard-size", "plenty"], "2GB"),
        (["--bits", 3, "--repair"], "Trellis"),
    ],
)
def test_one_line_errors_with_a_hint(polyquant, tmp_path, words, what):
    outcome = polyquant("convert", LLAMA, tmp_path / "out", *words)
    assert outcome.code == 2 and what in outcome.line, outcome
    assert not list(tmp_path.iterdir())


def test_quantized_sources_need_requantize(polyquant, tmp_path):
    outcome = polyquant("convert", QUANTIZED, tmp_path / "out", "--bits", 3)
    assert outcome.code == 2 and "--requantize" in outcome.line


def test_trellis_stays_trellis_unless_floats_are_requested(polyquant, tmp_path):
    source = VECTORS / "trellis/v2_cuda"
    assert polyquant("convert", source, tmp_path / "v3").code == 0
    assert (tmp_path / "v3/quantization_config.json").is_file()
    assert polyquant("convert", source, tmp_path / "floats", "--codec", "f16").code == 0
    assert not (tmp_path / "floats/quantization_config.json").exists()
    assert polyquant("convert", source, tmp_path / "mended", "--repair").code == 0
    same = (tmp_path / "v3/model-00001-of-00001.safetensors").read_bytes()
    assert same != (tmp_path / "mended/model-00001-of-00001.safetensors").read_bytes()
