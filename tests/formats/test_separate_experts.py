"""Fused experts in schemes that quantize linear layers: one matrix per expert, codes and logits kept both ways."""

import json

import numpy as np
import pytest

import polyquant
from architectures.golden_models import Golden
from polyquant.architectures.find import of_config
from polyquant.errors import InputError
from polyquant.opening import open_checkpoint
from polyquant.runtime.load import load
from polyquant.types import Action, Floats

FUSED = {  # model -> names inside a layer: gate, up, down of expert 1
    "gemma4": [f"experts.1.{part}_proj.weight" for part in ("gate", "up", "down")],
    "gpt_oss": [f"mlp.experts.1.{part}_proj.weight" for part in ("gate", "up", "down")],
    "gpt_oss_mxfp4": [f"mlp.experts.1.{part}_proj.weight" for part in ("gate", "up", "down")],
    "llama4": [f"feed_forward.experts.1.{part}_proj.weight" for part in ("gate", "up", "down")],
    "granitemoehybrid": [f"block_sparse_moe.experts.1.{w}.weight" for w in ("w1", "w3", "w2")],
}
LAYER = "model.layers.1."
CODES = {
    "compressed-tensors": "compressed.p4.g32", "gptq": "gptq.4.g32", "awq": "awq.4.g32", "fp8": None, "modelopt": None,
}  # fmt: skip


def experts(checkpoint):
    return {n: w for n, w in checkpoint.items() if ".experts." in n and len(w.shape) > 1}


@pytest.mark.parametrize("to", CODES)
@pytest.mark.parametrize("name", FUSED)
def test_each_expert_is_a_matrix(tmp_path, name, to):
    """The same logits from the quantized folder, from its floats with transformers' names, and from GGUF."""
    golden, codec = Golden(name), CODES[to]
    requested = {"requantize": True} if codec is None else {"codec": codec, "requantize": True}
    report = polyquant.quantize(golden.folder, tmp_path / "q", to=to, **requested)
    assert not any("experts" in w for w in report.warnings)
    found = open_checkpoint(tmp_path / "q")
    for inside in FUSED[name]:
        assert found[LAYER + inside].codec.form is not Floats
    polyquant.convert(tmp_path / "q", tmp_path / "floats", to="hf", codec="f32")
    floats, source = open_checkpoint(tmp_path / "floats"), open_checkpoint(golden.folder)
    assert set(floats) == {n.removesuffix("_blocks") for n in source}
    for w in source.values():
        assert sorted(floats[w.name.removesuffix("_blocks")].shape) == sorted(w.shape)
    polyquant.convert(tmp_path / "q", tmp_path / "m.gguf", codec="f32")
    tokens = golden.logits()["tokens"].tolist()
    want = load(tmp_path / "floats", activations="float").logits(tokens)
    for path in ("q", "m.gguf"):
        got = load(tmp_path / path, activations="float").logits(tokens)
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("name", ["gemma4", "llama4", "granitemoehybrid", "gpt_oss"])
def test_codes_are_kept(tmp_path, name):
    """Stacks of GGUF -> separate matrices -> another packing -> mlx-lm's stacks -> GGUF, one integer throughout."""
    golden = Golden(name)
    polyquant.quantize(golden.folder, tmp_path / "a.gguf", codec="q8_0")
    previous = tmp_path / "a.gguf"
    for target, to in (("b", "compressed-tensors"), ("c", "gptq"), ("d", "mlx"), ("e", "compressed-tensors")):
        plan = polyquant.plan(previous, to=to)
        stored = {s.action for s in plan.steps if ".experts." in s.map.target or "switch_" in s.map.target
                  if len(s.map.shape) > 1 and "_norm" not in s.map.target and s.source.form is not Floats}  # fmt: skip
        assert stored == {Action.TRANSCODE}
        polyquant.convert(previous, tmp_path / target, to=to)
        previous = tmp_path / target
    polyquant.convert(previous, tmp_path / "z.gguf")
    first, last = open_checkpoint(tmp_path / "a.gguf"), open_checkpoint(tmp_path / "z.gguf")
    stacks = [n for n in first if "_exps.weight" in n]
    assert stacks
    for stack in stacks:
        assert last[stack].codec.name == "q8_0"
        np.testing.assert_array_equal(last[stack].dequantize(), first[stack].dequantize())


def test_mxfp4_of_gpt_oss_is_kept(tmp_path):
    golden = Golden("gpt_oss_mxfp4")
    polyquant.convert(golden.folder, tmp_path / "m.gguf")
    before = open_checkpoint(golden.folder)["model.layers.1.mlp.experts.gate_up_proj_blocks"].dequantize()
    for source in (golden.folder, tmp_path / "m.gguf"):
        target = tmp_path / source.name.replace(".", "-")
        report = polyquant.convert(source, target, to="compressed-tensors", codec="hf_mxfp4")
        actions = {s.action for s in report.steps if ".experts." in s.tensor and s.tensor.endswith("weight")}
        assert actions
        assert actions <= {"copy", "transcode"}
        found = open_checkpoint(target)
        for e in range(4):
            for i, part in enumerate(("gate", "up")):
                got = found[f"model.layers.1.mlp.experts.{e}.{part}_proj.weight"].dequantize()
                np.testing.assert_array_equal(got, before[e, i::2])


@pytest.mark.parametrize("name", ["gemma4", "gpt_oss"])
def test_compare_pairs_fused_and_separate_experts(tmp_path, name):
    golden = Golden(name)
    polyquant.quantize(golden.folder, tmp_path / "q", to="compressed-tensors", codec="compressed.i8")
    found = polyquant.compare(golden.folder, tmp_path / "q")
    assert not found.only_a
    assert not found.only_b
    assert found.error.snr > 35


def test_transformers_has_no_conversion(tmp_path):
    polyquant.quantize(Golden("gemma4").folder, tmp_path / "q", to="compressed-tensors", codec="compressed.i8")
    found = [f for f in polyquant.validate(tmp_path / "q", target="transformers") if f.code == "HUB321"]
    assert [f.tensor for f in found] == ["model.layers.0.experts.0.down_proj.weight"]
    rules = [polyquant.Rule("*.experts.*", "bf16")]
    polyquant.quantize(
        Golden("gemma4").folder, tmp_path / "r", to="compressed-tensors", codec="compressed.i8", rules=rules
    )
    assert not any(f.code == "HUB321" for f in polyquant.validate(tmp_path / "r", target="transformers"))


def test_experts_that_stay_float_stay_fused(tmp_path):
    golden = Golden("gemma4")
    rules = [polyquant.Rule("*.experts.*", "bf16")]
    polyquant.quantize(golden.folder, tmp_path / "q", to="compressed-tensors", codec="compressed.i8", rules=rules)
    fused = experts(open_checkpoint(golden.folder))
    assert experts(open_checkpoint(tmp_path / "q")).keys() == fused.keys()


def test_experts_of_some_layers(tmp_path):
    """A layer's experts are fused or separate; both are read together."""
    golden = Golden("gemma4")
    rules = [polyquant.Rule("model.layers.0.experts.*", "bf16")]
    polyquant.quantize(golden.folder, tmp_path / "q", to="compressed-tensors", codec="compressed.i8", rules=rules)
    found = open_checkpoint(tmp_path / "q")
    assert "model.layers.0.experts.down_proj" in found
    assert "model.layers.1.experts.0.down_proj.weight" in found
    tokens = golden.logits()["tokens"].tolist()
    got = load(tmp_path / "q", activations="float").logits(tokens)
    polyquant.convert(tmp_path / "q", tmp_path / "floats", to="hf", codec="f32")
    want = load(tmp_path / "floats", activations="float").logits(tokens)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())


def test_calibrated(tmp_path):
    golden = Golden("gemma4")
    text = tmp_path / "text.txt"
    text.write_text("And it came to pass in those days. " * 60, encoding="utf-8")
    polyquant.quantize(
        golden.folder, tmp_path / "q", to="compressed-tensors", codec="compressed.p4.g32", calibration=str(text)
    )
    assert polyquant.compare(golden.folder, tmp_path / "q").error.snr > 15


def test_missing_expert(tmp_path):
    golden = Golden("gemma4")
    polyquant.quantize(golden.folder, tmp_path / "q", to="compressed-tensors", codec="compressed.i8")
    config = json.loads((tmp_path / "q" / "config.json").read_text(encoding="utf-8"))
    assert of_config(config).fused is not None
    config["num_experts"] += 1
    (tmp_path / "q" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(InputError, match="expert 4 is missing"):
        load(tmp_path / "q")
