"""Unsupported quantization schemes: `inspect` shows the weights, every other command fails with one line."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

UP = "model.layers.0.mlp.up_proj"


@pytest.fixture
def folder(tmp_path):
    """8-bit floats with a scale, of an unknown program."""
    path = tmp_path / "m"
    path.mkdir()
    weight, scale = np.ones((32, 64), ml_dtypes.float8_e4m3fn), np.full((), 0.01, np.float32)
    save_file({f"{UP}.weight": weight, f"{UP}.weight_scale": scale}, path / "model.safetensors")
    said = {"quant_method": "fancy8"}
    (path / "config.json").write_text(json.dumps({"model_type": "qwen2", "quantization_config": said}))
    (path / "tokenizer.json").write_text("{}")
    (path / "text.txt").write_text("In the beginning")
    return path


@pytest.mark.parametrize("words", [
    ["convert", "m", "m.gguf"], ["convert", "m", "m.gguf", "--codec", "f16"], ["convert", "m", "copy"],
    ["quantize", "m", "m.gguf"],
    ["convert", "m", "m.gguf", "--codec", "q8_0", "--requantize"], ["run", "m", "-p", "x"],
    ["eval", "m", "--text", "m/text.txt"], ["compare", "m", "m"],
])  # fmt: skip
def test_commands_that_read_weights_refuse(polyquant, folder, words):
    places = {w: folder.parent / w for w in ("m", "m.gguf", "copy", "m/text.txt")}
    outcome = polyquant(*(places.get(w, w) for w in words))
    assert outcome.code == 2
    assert f"{UP}.weight: unsupported quantization scheme: fancy8" in outcome.line
    assert "expected float weights, found F8_E4M3 [32, 64]" in outcome.line
    assert "--codec" not in outcome.line
    assert [p.name for p in folder.parent.iterdir()] == ["m"]


def test_commands_that_inspect_work(polyquant, folder):
    shown = polyquant("inspect", folder)
    assert shown.code == 0
    assert "fancy8" in shown.out + shown.err and "undecoded.f8_e4m3" in shown.out
    checked = polyquant("validate", folder)
    assert checked.code == 1
    assert "HF061" in checked.out and "fancy8" in checked.out
