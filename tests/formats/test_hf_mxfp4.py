"""gpt-oss folders with MXFP4 experts: opened, checked, refused; their codes are kept unless a codec is requested."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import polyquant
from architectures.golden_models import Golden
from polyquant.errors import InputError, PlanError
from polyquant.recipes.recipe import Rule
from polyquant.types import Action, Severity

GOLDEN = Golden("gpt_oss_mxfp4")
EXPERTS = "model.layers.0.mlp.experts"


def changed(path, **tensors):
    """A copy of the golden folder with other tensors in layer 0; None: without it."""
    shutil.copytree(GOLDEN.folder, path)
    stored = load_file(path / "model.safetensors")
    stored |= {f"{EXPERTS}.{name}": array for name, array in tensors.items()}
    save_file({n: a for n, a in stored.items() if a is not None}, path / "model.safetensors")
    return path


def packed_tensors(path):
    return {n: a for n, a in load_file(path / "model.safetensors").items() if n.endswith(("_blocks", "_scales"))}


def test_blocks_and_scales_are_one_weight():
    weight = polyquant.open(GOLDEN.folder)[f"{EXPERTS}.gate_up_proj_blocks"]
    assert weight.codec.name == "hf_mxfp4" and weight.shape == (4, 192, 64) and weight.bpw == 4.25
    assert not [f for f in polyquant.validate(GOLDEN.folder) if f.severity is Severity.ERROR]
    assert f"{EXPERTS}.gate_up_proj_scales" not in polyquant.open(GOLDEN.folder)


def test_codes_move_to_gguf_and_back_bit_for_bit(tmp_path):
    plan = polyquant.plan(GOLDEN.folder, "gguf")
    assert plan.actions[Action.TRANSCODE] >= 9 and not plan.actions[Action.DEQUANTIZE]
    polyquant.convert(GOLDEN.folder, tmp_path / "m.gguf", to="gguf")
    assert {w.codec.name for n, w in polyquant.open(tmp_path / "m.gguf").items() if n.endswith("_exps.weight")} == {
        "mxfp4"
    }
    polyquant.convert(tmp_path / "m.gguf", tmp_path / "back", to="hf")
    ours, wanted = packed_tensors(tmp_path / "back"), packed_tensors(GOLDEN.folder)
    assert ours.keys() == wanted.keys() and len(wanted) == 12
    for name, array in wanted.items():
        np.testing.assert_array_equal(ours[name], array, err_msg=name)
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "mxfp4"
    assert "lm_head" in config["quantization_config"]["modules_to_not_convert"]


def test_a_folder_keeps_its_codes_or_becomes_the_float_model(tmp_path):
    polyquant.convert(GOLDEN.folder, tmp_path / "same", to="hf")
    ours, wanted = packed_tensors(tmp_path / "same"), packed_tensors(GOLDEN.folder)
    assert ours.keys() == wanted.keys() and all(np.array_equal(ours[n], wanted[n]) for n in wanted)
    polyquant.convert(GOLDEN.folder, tmp_path / "f32", to="hf", codec="f32")
    weight = polyquant.open(GOLDEN.folder)[f"{EXPERTS}.down_proj_blocks"].dequantize()
    found = polyquant.open(tmp_path / "f32")[f"{EXPERTS}.down_proj"].dequantize()
    np.testing.assert_array_equal(found, weight.swapaxes(1, 2))
    assert "quantization_config" not in json.loads((tmp_path / "f32" / "config.json").read_text())
    assert "quantization_config" in json.loads((tmp_path / "same" / "config.json").read_text())


def test_other_targets_get_the_float_model(tmp_path):
    polyquant.convert(GOLDEN.folder, tmp_path / "m.gguf", to="gguf")
    polyquant.convert(tmp_path / "m.gguf", tmp_path / "f32", to="hf", codec="f32")
    names = {n for n in polyquant.open(tmp_path / "f32") if n.startswith(EXPERTS)}
    assert names == {f"{EXPERTS}.{part}_proj{bias}" for part in ("gate_up", "down") for bias in ("", "_bias")}
    rules = [Rule("model.layers.0.mlp.experts.down_proj_blocks", "f32")]
    with pytest.raises(PlanError, match="cannot become f32 individually"):
        polyquant.plan(tmp_path / "m.gguf", "hf", rules=rules)


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"down_proj_scales": None}, "lacks its scales"),
        ({"down_proj_scales": np.ones((4, 64, 2), np.uint8)}, "scales do not fit"),
        ({"down_proj_blocks": np.ones((4, 64, 3, 8), np.uint8)}, "blocks have an unexpected shape"),
    ],
)
def test_mismatched_parts_are_refused(tmp_path, tensors, said):
    path = changed(tmp_path / "m", **tensors)
    with pytest.raises(InputError, match=said) as e:
        polyquant.open(path)
    assert str(path) in str(e.value) and "\n" not in str(e.value)
    assert [f.code for f in polyquant.validate(path) if f.severity is Severity.ERROR] == ["HF063"]
