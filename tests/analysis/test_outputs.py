"""Errors of layers' outputs: of the layer alone, on the float model's inputs, with the arithmetic of the format."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

import polyquant
from architectures.golden_models import Golden
from msmodelslim_vectors import ROOT, runnable, source_of
from polyquant.analysis.demo import demo_model
from polyquant.analysis.outputs import compare_outputs
from polyquant.cli import cli
from polyquant.errors import InputError

IDS = ROOT / "models/qwen2_fp16/calib_ids.json"


def test_a_model_has_no_error_against_itself():
    for layer in compare_outputs(source_of("v0/fp16/w8a16"), source_of("v0/fp16/w8a16"), IDS):
        assert layer.layer == 0
        assert all(e.error == 0 and not e.scaled for e in layer.linears.values())


@pytest.mark.parametrize("name", ["llama3", "qwen3_next", "gpt_oss", "granitemoe"])
def test_rows_that_gguf_permutes(tmp_path, name):
    """A lossless conversion has no error, in both directions."""
    golden = Golden(name)
    polyquant.convert(golden.folder, tmp_path / "m.gguf", codec="f32")
    text = tmp_path / "samples.json"
    text.write_text(json.dumps([[int(t) for t in golden.logits()["tokens"]] * 8]), encoding="utf-8")
    for pair in ((golden.folder, tmp_path / "m.gguf"), (tmp_path / "m.gguf", golden.folder)):
        for layer in compare_outputs(*pair, text):
            assert max(e.error for e in layer.linears.values()) < 0.05  # inputs of the second are quantized


def test_quantized_inputs_add_more_error_than_weights(tmp_path):
    weights = compare_outputs(source_of("v0/fp16/w8a16"), runnable("v0/fp16/w8a16", tmp_path / "a"), IDS)
    inputs = compare_outputs(source_of("v0/fp16/w8a8"), runnable("v0/fp16/w8a8", tmp_path / "b"), IDS)
    assert len(weights) == 2
    for a, b in zip(weights, inputs, strict=True):
        assert list(a.linears) == list(b.linears) and len(a.linears) == 7
        assert 0 < a.layer < 0.05 < b.layer < 0.6
        assert sum(e.error for e in a.linears.values()) < 0.5 * sum(e.error for e in b.linears.values())


def test_smoothed_channels_are_detected(tmp_path):
    """m4 moves scales from v to o and from up to down: the outputs of v and up change, those of the layer do not."""
    for layer in compare_outputs(
        source_of("v0/bf16/w8a8_m4"), runnable("v0/bf16/w8a8_m4", tmp_path), ROOT / "models/qwen2_bf16/calib_ids.json"
    ):
        scaled = {name.split(".")[-2] for name, e in layer.linears.items() if e.scaled}
        assert "up_proj" in scaled
        assert scaled <= {"up_proj", "v_proj"}
        assert max(e.error for e in layer.linears.values()) < 0.15
        assert layer.layer < 0.15


def test_a_different_model_is_refused(tmp_path):
    with pytest.raises(InputError, match="not the same model"):
        compare_outputs(source_of("v0/fp16/w8a16"), demo_model("llama"), IDS)


def test_command_line(tmp_path):
    out, text = tmp_path / "out", tmp_path / "text.txt"
    text.write_text((demo_model("llama").parent / "held-out.txt").read_text()[:6000])
    polyquant.quantize(demo_model("llama"), out, to="msmodelslim", codec="w8a8.dynamic")
    done = CliRunner().invoke(cli, ["compare", str(demo_model("llama")), str(out), "--text", str(text)])
    assert done.exit_code == 0, done.output
    assert "gate" in done.output and "worst layer" in done.output and "*" not in done.output
    found = CliRunner().invoke(
        cli, ["compare", str(demo_model("llama")), str(out), "--text", str(text), "--format", "json"]
    )
    layers = json.loads(found.output)
    assert [layer["index"] for layer in layers] == [0, 1, 2, 3]
    assert 0 < np.mean([layer["layer"] for layer in layers]) < 0.05
