"""ModelOpt folders with an algorithm for each module: MIXED_PRECISION, quantized_layers."""

import json
import shutil

import numpy as np
import pytest

import golden
import hub_vectors
import polyquant
from polyquant.errors import InputError, UnsupportedError
from polyquant.opening import open_checkpoint
from polyquant.runtime.load import load

MODEL = golden.VECTORS / "models" / "tiny-llama-untied" / "hf"
OUT, DOWN = "model.layers.0.self_attn.o_proj", "model.layers.0.mlp.down_proj"
RULES = ("*.o_proj.weight=fp8.e4m3.tensor.f32", "*.down_proj.weight=hf_mxfp8", "*.v_proj.weight=bf16")


def settings_of(folder):
    return json.loads((folder / "config.json").read_text())["quantization_config"]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    out = tmp_path_factory.mktemp("mixed") / "model"
    polyquant.quantize(MODEL, out, to="modelopt", codec="hf_nvfp4", rules=RULES)
    return out


def changed(folder, out, change):
    """A copy whose settings, in both files, are changed."""
    shutil.copytree(folder, out)
    for name, key in (("config.json", "quantization_config"), ("hf_quant_config.json", "quantization")):
        content = json.loads((out / name).read_text())
        change(content[key])
        (out / name).write_text(json.dumps(content))
    return out


def test_settings(mixed):
    """Both files as ModelOpt writes them: an entry for each module, a group for each kind."""
    settings = settings_of(mixed)
    hf_quant = json.loads((mixed / "hf_quant_config.json").read_text())["quantization"]
    layers = settings["quantized_layers"]
    assert hf_quant["quantized_layers"] == layers
    assert settings["quant_algo"] == hf_quant["quant_algo"] == "MIXED_PRECISION"
    assert layers[OUT] == {"quant_algo": "FP8"} and layers[DOWN] == {"quant_algo": "MXFP8", "group_size": 32}
    assert layers["model.layers.0.self_attn.q_proj"] == {"quant_algo": "W4A16_NVFP4", "group_size": 16}
    assert "model.layers.0.self_attn.v_proj" in settings["ignore"] and "lm_head" not in layers
    targets = [set(group["targets"]) for group in settings["config_groups"].values()]
    assert len(targets) == 3 and set().union(*targets) == set(layers) and sum(map(len, targets)) == len(layers)
    eight = next(g for g in settings["config_groups"].values() if OUT in g["targets"])
    assert eight["weights"] == {"dynamic": False, "num_bits": 8, "type": "float"}


def test_round_trip(mixed, tmp_path):
    """The folder opens with a codec for each algorithm, runs, keeps its codes elsewhere, and is written again."""
    before = polyquant.open(mixed)
    assert [before[f"{m}.weight"].codec.name for m in (OUT, DOWN)] == ["fp8.e4m3.tensor.f32", "hf_mxfp8"]
    polyquant.convert(mixed, tmp_path / "ct", to="compressed-tensors")
    polyquant.convert(tmp_path / "ct", tmp_path / "back", to="modelopt")
    assert settings_of(tmp_path / "ct")["format"] == "mixed-precision"
    assert settings_of(tmp_path / "back") == settings_of(mixed)
    after = polyquant.open(tmp_path / "back")
    for name, weight in before.items():
        np.testing.assert_allclose(after[name].dequantize(), weight.dequantize(), rtol=3e-7)  # reciprocals
    tokens = [1, 5, 9]
    np.testing.assert_allclose(load(tmp_path / "back").logits(tokens), load(mixed).logits(tokens), atol=1e-2)


def test_one_algorithm_has_no_layers(tmp_path):
    polyquant.quantize(MODEL, tmp_path / "m", to="modelopt", codec="hf_nvfp4")
    settings = settings_of(tmp_path / "m")
    assert settings["quant_algo"] == "W4A16_NVFP4" and "quantized_layers" not in settings
    assert settings["config_groups"]["group_0"]["targets"] == ["Linear"]


def test_library_folder_described_as_a_mix(tmp_path):
    """Weights of ModelOpt, described per module, decode as in the folder with one algorithm."""
    source = hub_vectors.folder("modelopt-nvfp4")
    described = {f"model.layers.{i}.{m}": {"quant_algo": "NVFP4", "group_size": 16}
                 for i in range(2) for m in ("self_attn.q_proj", "mlp.down_proj")}  # fmt: skip
    folder = tmp_path / "m"
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= {"quant_algo": "MIXED_PRECISION", "quantized_layers": described}
    (folder / "config.json").write_text(json.dumps(config))
    before, after = polyquant.open(source), polyquant.open(folder)
    for name, weight in before.items():
        assert after[name].codec.name == weight.codec.name
        np.testing.assert_array_equal(after[name].dequantize(), weight.dequantize())


def test_fp8_without_a_scale_of_inputs(tmp_path):
    """One scale per tensor becomes one per row, the algorithm that needs no scale of the inputs: equal weights."""
    polyquant.quantize(MODEL, tmp_path / "ct", to="compressed-tensors", codec="fp8.e4m3.tensor")
    polyquant.convert(tmp_path / "ct", tmp_path / "out", to="modelopt")
    assert settings_of(tmp_path / "out")["quant_algo"] == "FP8_PER_CHANNEL_PER_TOKEN"
    before, after = polyquant.open(tmp_path / "ct"), polyquant.open(tmp_path / "out")
    assert after[f"{DOWN}.weight"].codec.name == "fp8.e4m3.f32"
    for name, weight in before.items():
        np.testing.assert_array_equal(after[name].dequantize(), weight.dequantize())
    assert "HUB126" not in {f.code for f in polyquant.validate(tmp_path / "out", target="vllm")}
    polyquant.quantize(MODEL, tmp_path / "one", to="modelopt", codec="fp8.e4m3.tensor.f32")
    found = [f for f in polyquant.validate(tmp_path / "one", target="vllm") if f.code == "HUB126"]
    assert f"{DOWN}" in {f.tensor for f in found}


def test_settings_that_contradict_a_module(mixed, tmp_path):
    folder = changed(mixed, tmp_path / "a", lambda q: q["quantized_layers"].update({OUT: {"quant_algo": "NVFP4"}}))
    with pytest.raises(InputError, match="contradicts") as raised:
        open_checkpoint(folder)
    assert OUT in str(raised.value) and "\n" not in str(raised.value)


def test_an_unknown_algorithm_of_a_module_is_named(tmp_path):
    """W4A8_AWQ has other scales than W4A16_AWQ, with tensors of the same kinds."""
    polyquant.quantize(MODEL, tmp_path / "m", to="modelopt", codec="modelopt.int4.g32")
    modules = {n.removesuffix(".weight") for n in polyquant.open(tmp_path / "m") if n.endswith("proj.weight")}

    def change(settings):
        layers = {m: {"quant_algo": "W4A16_AWQ", "group_size": 32} for m in modules}
        settings |= {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers | {DOWN: {"quant_algo": "W4A8_AWQ"}}}

    with pytest.raises(UnsupportedError, match="W4A8_AWQ"):
        open_checkpoint(changed(tmp_path / "m", tmp_path / "a", change))


def test_a_module_inherits_from_the_one_around_it(mixed, tmp_path):
    """An entry for a module, such as all experts, holds for those inside."""
    layer = {"model.layers.0.mlp": {"quant_algo": "NVFP4"}}
    with pytest.raises(InputError, match="contradicts"):
        open_checkpoint(changed(mixed, tmp_path / "a", lambda q: q.update(quantized_layers=layer)))


@pytest.mark.parametrize(
    ("layers", "rejected"), [({}, True), ({OUT: {"quant_algo": "FP8_PB_WO"}}, True), (None, False)]
)
def test_what_vllm_reads_in_a_mix(layers, rejected, mixed, tmp_path):
    folder = mixed
    if layers is not None:
        folder = changed(mixed, tmp_path / "a", lambda q: q.update(quantized_layers=layers))
    assert ("HUB117" in {f.code for f in polyquant.validate(folder, target="vllm")}) is rejected
