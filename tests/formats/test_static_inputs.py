"""Static W8A8: the grid of the inputs is kept between msModelSlim and compressed-tensors."""

import json
import shutil

import numpy as np
import pytest

import hub_vectors
import polyquant
from golden import VECTORS
from polyquant.analysis.demo import demo_model
from polyquant.calibration.stages import calibration_windows
from polyquant.errors import CodecError, PlanError, UnsupportedError
from polyquant.runtime.load import load
from polyquant.types import Activation, Affine

MSMODELSLIM = VECTORS / "msmodelslim"
GENUINE = [("v1/bf16/w8a8_static", "qwen3_bf16"), ("v0/bf16/w8a8", "qwen2_bf16"), ("v0/fp16/w8a8s", "qwen2_fp16")]
IDS = [5, 17, 3, 99, 42, 8, 77, 120]


def model_folder(path, mode, model):
    shutil.copytree(MSMODELSLIM / mode, path, copy_function=shutil.copyfile)
    shutil.copyfile(MSMODELSLIM / "models" / model / "config.json", path / "config.json")
    return path


def grids(path):
    """Layer -> scale and zero point of its inputs, and the codes, of either format."""
    out = {}
    for name, weight in polyquant.open(path).items():
        parts = {key: np.asarray(part) for key, part in weight.read().items()}
        if "input_scale" in parts:
            zero = parts.get("input_offset", parts.get("input_zero_point", np.zeros(1)))
            out[name] = (np.float32(parts["input_scale"][0]), int(zero[0]), parts["weight"].tobytes())
    return out


@pytest.mark.parametrize(("mode", "model"), GENUINE)
def test_folders_of_the_tool(tmp_path, mode, model):
    source = model_folder(tmp_path / "source", mode, model)
    report = polyquant.convert(source, tmp_path / "ct", to="compressed-tensors", allow_unknown=True)
    assert grids(tmp_path / "ct") == grids(source) and grids(source)
    assert all(s.error is None or s.error.rrmse < 1e-6 for s in report.steps)
    group = json.loads((tmp_path / "ct/config.json").read_text())["quantization_config"]["config_groups"]["group_0"]
    assert (group["format"], group["weights"]["strategy"]) == ("int-quantized", "channel")
    inputs = group["input_activations"]
    assert (inputs["dynamic"], inputs["symmetric"], inputs["strategy"]) == (False, False, "tensor")
    polyquant.convert(tmp_path / "ct", tmp_path / "back", to="msmodelslim", allow_unknown=True)
    before, after = polyquant.open(source), polyquant.open(tmp_path / "back")
    for name, grid in grids(source).items():
        biased = f"{name.removesuffix('weight')}bias" in before  # quant_bias holds it, so the grid is not written
        assert after[name].codec.name.startswith("w8a16" if biased else "w8a8")
        assert biased or grids(tmp_path / "back")[name] == grid


def test_folder_of_llm_compressor(tmp_path):
    """Complete round trip; msModelSlim's products are on the grid, so they are closer to the library's logits."""
    source = hub_vectors.folder("ct-w8a8-int-static-asym")
    polyquant.convert(source, tmp_path / "ms", to="msmodelslim", allow_unknown=True)
    assert grids(tmp_path / "ms") == grids(source)
    assert not [f for f in polyquant.validate(tmp_path / "ms") if f.severity.name == "ERROR"]
    polyquant.convert(tmp_path / "ms", tmp_path / "ct", to="compressed-tensors", allow_unknown=True)
    have, want = polyquant.open(tmp_path / "ct"), polyquant.open(source)
    for name in grids(source):
        for part, array in want[name].read().items():
            np.testing.assert_array_equal(
                np.asarray(have[name].read()[part], np.float32), np.asarray(array, np.float32)
            )


def test_products_use_the_grid(tmp_path):
    source = model_folder(tmp_path / "source", *GENUINE[0])
    polyquant.convert(source, tmp_path / "ct", to="compressed-tensors", allow_unknown=True)
    polyquant.convert(tmp_path / "ct", tmp_path / "back", to="msmodelslim", allow_unknown=True)
    want, got = load(source).logits(IDS), load(tmp_path / "back").logits(IDS)
    assert np.linalg.norm(got - want) < 1e-5 * np.linalg.norm(want)


@pytest.mark.parametrize(
    ("codec", "offset", "error"),
    [
        ("compressed.i8.f32.static", 3, CodecError), ("compressed.i8.f32.szp", 0.5, CodecError),
        ("compressed.i8.f32.szp", 200, CodecError), ("compressed.i8.f32.szp", None, UnsupportedError),
        ("compressed.i8.f32.szp", -128, None), ("compressed.i8.f32.static", 0, None),
    ],
)  # fmt: skip
def test_zero_points_that_fit(codec, offset, error):
    one = np.ones((2, 1), np.float32)
    grid = None
    if offset is not None:
        grid = Activation(one[0], np.float32([offset]), one[:, 0], np.zeros(2, np.int32))
    codes = Affine(8, np.ones((2, 4), np.int8), one, one * 0, grid)
    if error is not None:
        with pytest.raises(error):
            polyquant.codec(codec).pack(codes)
        return
    parts = polyquant.codec(codec).pack(codes)
    again = polyquant.codec(codec).input_grid(parts, codes)
    assert again is not None and again.offset == offset and again.scale == 1
    np.testing.assert_array_equal(again.quant_bias, [-4 * offset, -4 * offset])


# ---------------------------------------------------------------- measured


MEASURED = {  # codec -> (scheme, part, the scale for inputs from -a to a)
    "compressed.i8.f32.static": ("compressed-tensors", lambda a: a / 127.5),
    "fp8.e4m3.tensor.f32.static": ("modelopt", lambda a: a / 448),
    "hf_nvfp4.static": ("modelopt", lambda a: a / 2688),
    "hf_nvfp4.div.static": ("compressed-tensors", lambda a: 2688 / a),
}
TEXT = "And it came to pass in those days, that there went out a decree. " * 12


def first_inputs(folder, text):
    """Inputs of the first layer's q, k and v on the windows of the calibration: RMS norm of the embedding."""
    model = load(folder, activations="float")
    tokens = np.concatenate(calibration_windows(model, text))
    weights = polyquant.open(folder)
    x = weights["model.embed_tokens.weight"].dequantize()[tokens].astype(np.float64)
    x /= np.sqrt(np.square(x).mean(1, keepdims=True) + model.checkpoint.config["rms_norm_eps"])
    return x * weights["model.layers.0.input_layernorm.weight"].dequantize()


@pytest.mark.parametrize("codec", MEASURED)
def test_measured_scales(tmp_path, codec):
    """The scale of q, k and v in the first layer, and a sound folder for vLLM."""
    (scheme, wanted), source = MEASURED[codec], demo_model("llama")
    text = tmp_path / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    largest = np.abs(first_inputs(source, text)).max()
    with pytest.raises(PlanError, match="measured on a text"):
        polyquant.plan(source, to=scheme, codec=codec)
    polyquant.quantize(source, tmp_path / "q", to=scheme, codec=codec, calibration=str(text))
    found = polyquant.open(tmp_path / "q")
    for part in "qkv":
        weight = found[f"model.layers.0.self_attn.{part}_proj.weight"]
        assert weight.codec.name == codec
        np.testing.assert_allclose(weight.read()["input_scale"], [wanted(largest)], rtol=1e-5)
    scales = {float(w.read()["input_scale"][0]) for w in found.values() if "input_scale" in w.parts}
    assert len(scales) == 16  # q, k and v share one, and so do gate and up
    assert not [f for f in polyquant.validate(tmp_path / "q", target="vllm") if f.severity == "error"]


def test_measured_zero_point():
    """The grid of compressed-tensors: -128 for the least input, 127 for the largest; 0 is a code."""
    codec = polyquant.codec("compressed.i8.f32.szp")
    w = np.random.default_rng(0).standard_normal((8, 64), np.float32)
    grid = codec.with_inputs(codec.quantize(w), -1.0, 4.1).activation
    assert (grid.scale[0], grid.offset[0]) == (np.float32(5.1 / 255), -78)
    assert codec.with_inputs(codec.quantize(w), 0.5, 2.0).activation.offset[0] == -128
    assert codec.with_inputs(codec.quantize(w), 0.0, 0.0).activation.scale[0] == 1
    dead = polyquant.codec("hf_nvfp4.static")
    assert dead.with_inputs(dead.quantize(w), 0.0, 0.0).inputs[0] == 1


def test_every_expert_has_a_scale(tmp_path):
    """One that no token of the text reaches has the range of the others."""
    text = tmp_path / "text.txt"
    text.write_text(TEXT[:200], encoding="utf-8")
    source = VECTORS / "architectures" / "qwen3_moe"
    polyquant.quantize(source, tmp_path / "q", to="modelopt", codec="hf_nvfp4.static", calibration=str(text))
    experts = [w for n, w in polyquant.open(tmp_path / "q").items() if ".experts." in n]
    scales = [float(w.read()["input_scale"][0]) for w in experts]
    assert len(experts) == 3 * 8 * 3
    assert all(0 < s < 1 for s in scales)


def test_every_fused_expert_has_a_scale(tmp_path):
    """Also one matrix of a stack: gate and up have the inputs of the layer's other experts, not those of down."""
    text = tmp_path / "text.txt"
    text.write_text("a" * 400, encoding="utf-8")  # one token: most experts are not reached
    source = VECTORS / "architectures" / "gemma4"
    polyquant.quantize(source, tmp_path / "q", to="modelopt", codec="hf_nvfp4.static", calibration=str(text))
    scales = {
        n: float(w.read()["input_scale"][0]) for n, w in polyquant.open(tmp_path / "q").items() if ".experts." in n
    }
    assert len(scales) == 6 * 4 * 3
    assert all(0 < s < 1 for s in scales.values())
    for name, scale in scales.items():
        if "gate_proj" in name:
            assert scales[name.replace("gate", "up")] == scale
